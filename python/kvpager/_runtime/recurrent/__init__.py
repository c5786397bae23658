"""States of recurrent layers: of each text, as checkpoints, and in snapshots."""
