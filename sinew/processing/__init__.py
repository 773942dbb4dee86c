"""From an observation to model inputs and from model outputs to actions. No torch: engines without it use this too."""

from sinew.processing.processor import ModelInputs, Prepared, Processor

__all__ = ["ModelInputs", "Prepared", "Processor"]
