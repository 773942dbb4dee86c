"""Turn observations into model inputs, and model outputs into actions. Needs no torch, so ONNX engines can use it
too."""

from sinew.processing.batch import BatchKey, batch_key, stack, stack_prompts
from sinew.processing.processor import Allowed, ModelInputs, Prepared, Processor, Words
