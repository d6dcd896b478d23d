"""Where in a model the tapped tensors are: the same for every engine that runs torch modules."""

from undercurrent.adapters.model_map import ModelMap

__all__ = ["ModelMap"]
