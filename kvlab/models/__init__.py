"""Models: where weights come from (`load`, `smollm2`, `tiny`) and the seam to transformers.

Nothing is imported here, so that `kvlab.models.load.ModelCfg` costs no torch.
"""
