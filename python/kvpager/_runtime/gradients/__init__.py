"""Log-probabilities with gradients: the forwards of a rollout, with autograd recorded."""
