"""From an observation to model inputs and from model outputs to actions. No torch: engines without it use this too."""

from sinew.processing.batch import BatchKey, batch_key, stack, stack_prompts
from sinew.processing.processor import Allowed, ModelInputs, Prepared, Processor, Words
