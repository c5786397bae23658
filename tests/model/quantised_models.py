"""Small models whose layers keep their weights as libraries of quantisation do, in few lines."""

from __future__ import annotations

import torch
from reference_models import COMMON, build

GROUP = 32  # columns that share a scale
SMALL = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}


def coded(weight):
    """Codes [out, in] int8 and scales [out, in / GROUP] float32 of a weight."""
    grouped = weight.detach().float().view(len(weight), -1, GROUP)
    scales = (grouped.abs().amax(-1) / 127).clamp_min(1e-9)
    codes = (grouped / scales[..., None]).round().to(torch.int8)
    return codes.view(weight.shape), scales


def decoded(codes, scales, dtype):
    """A weight [out, in]."""
    grouped = codes.view(len(codes), -1, GROUP).float() * scales[..., None]
    return grouped.view(codes.shape).to(dtype)


class State:
    """How the codes of a weight are read, beside it as bitsandbytes has it."""

    def __init__(self, scales):
        self.scales = scales
        self.group = GROUP
        self.dtype = torch.float32
        self.more = {"factor": 1.0, "table": [torch.ones(4)]}


class CodedParameter(torch.nn.Parameter):
    """Bytes, with an object that says how to read them."""

    def __new__(cls, codes, state, owner):
        self = torch.Tensor._make_subclass(cls, codes.view(torch.uint8), False)
        self.state = state
        self.owner = owner  # as bitsandbytes keeps its module: a circle
        return self


class CodedTensor(torch.Tensor):
    """A tensor that is made of others and says so, as those of torchao and quanto."""

    @staticmethod
    def __new__(cls, codes, scales, factor=1.0):
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)

    def __init__(self, codes, scales, factor=1.0):
        self.codes = codes
        self.scales = scales
        self.factor = factor

    def __tensor_flatten__(self):
        return ["codes", "scales"], {"factor": self.factor}

    @classmethod
    def __tensor_unflatten__(cls, inner, context, size, stride):
        return cls(inner["codes"], inner["scales"], context["factor"])

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function is torch.nn.functional.linear:
            x, weight, bias = (*args, None)[:3]
            plain = decoded(weight.codes, weight.scales * weight.factor, x.dtype)
            return torch.nn.functional.linear(x, plain, bias)
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        if function is torch.ops.aten.detach.default:
            return cls(args[0].codes, args[0].scales, args[0].factor)
        raise NotImplementedError(function)


class Silent(CodedTensor):
    """Such a tensor that does not say what it is made of."""

    @property
    def __tensor_flatten__(self):
        raise AttributeError("__tensor_flatten__")


class _Coded(torch.nn.Module):
    def __init__(self, linear):
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.keep(*coded(linear.weight))

    def forward(self, x):
        return torch.nn.functional.linear(self.made_of(x), self.weights(x.dtype))

    def made_of(self, x):
        return x


class ObjectLinear(_Coded):
    """Bytes and an object beside them (bitsandbytes)."""

    def keep(self, codes, scales):
        self.weight = CodedParameter(codes, State(scales), self)

    def weights(self, dtype):
        state = self.weight.state
        codes = self.weight.data.as_subclass(torch.Tensor).view(torch.int8)
        return decoded(codes, state.scales * state.more["factor"], dtype)


class AttributesLinear(_Coded):
    """Codes in a parameter, the rest in a dictionary (HQQ)."""

    def keep(self, codes, scales):
        self.W_q = torch.nn.Parameter(codes, requires_grad=False)
        self.meta = {"scale": scales, "shape": codes.shape, "packing": None, "factor": 1.0}

    def weights(self, dtype):
        return decoded(self.W_q, self.meta["scale"] * self.meta["factor"], dtype)


class BuffersLinear(_Coded):
    """Words of 32 bits in buffers (GPTQ, AWQ)."""

    def keep(self, codes, scales):
        self.register_buffer("qweight", codes.view(torch.int32))
        self.register_buffer("scales", scales)

    def weights(self, dtype):
        return decoded(self.qweight.view(torch.int8), self.scales, dtype)


class LazyLinear(BuffersLinear):
    """Puts its words in another order in its first forward, as some kernels want them."""

    def weights(self, dtype):
        if not hasattr(self, "order"):
            self.order = torch.arange(len(self.qweight)).flip(0)
            self.qweight = self.qweight[self.order]
            self.scales = self.scales[self.order]
        return super().weights(dtype)[self.order]


class PerTokenLinear(BuffersLinear):
    """Rounds activations by a scale of each row."""

    dims = -1

    def made_of(self, x):
        scale = x.abs().amax(self.dims, keepdim=True).clamp_min(1e-9) / 127
        return (x / scale).round() * scale


class PerTensorLinear(PerTokenLinear):
    """Rounds activations by a scale of the whole forward."""

    dims = (-2, -1)


class OneRowLinear(BuffersLinear):
    """Adds up in another order where there is one row."""

    def forward(self, x):
        weights = self.weights(x.dtype)
        if x.numel() == x.shape[-1]:
            return torch.nn.functional.linear(x.flip(-1), weights.flip(-1))
        return torch.nn.functional.linear(x, weights)


class OneRowInFloatLinear(BuffersLinear):
    """Adds up one row in float32 in an order of its own, and rounds once, as the others do."""

    def forward(self, x):
        weights = self.weights(x.dtype)
        if x.numel() == x.shape[-1]:
            halves = (x.float() * weights.float()).view(*x.shape[:-1], len(weights), 2, -1)
            return halves.sum(-1).sum(-1).to(x.dtype)
        return torch.nn.functional.linear(x.float(), weights.float()).to(x.dtype)


def with_tensors(linear, kind=CodedTensor):
    """The same layer with a weight that is made of tensors."""
    linear.weight = torch.nn.Parameter(kind(*coded(linear.weight)), requires_grad=False)
    return linear


KINDS = {
    "object": ObjectLinear,
    "tensor": with_tensors,
    "attributes": AttributesLinear,
    "buffers": BuffersLinear,
}


def quantised(kind, dtype="float32", **changes):
    """A small model all of whose layers' matrices are kept in this way; `kind` makes a layer."""
    model = build("llama", dtype, **{**COMMON, **SMALL, **changes})
    make = KINDS.get(kind, kind)
    for layer in model.model.layers:
        for part in (layer.self_attn, layer.mlp):
            for name, linear in [*part.named_children()]:
                if isinstance(linear, torch.nn.Linear):
                    setattr(part, name, make(linear))
    return model.eval()


def first_layer(model):
    """The module of a matrix of a model that `quantised` has made."""
    return model.model.layers[1].self_attn.k_proj
