"""Open a bundle with the reference engine."""

from __future__ import annotations

from sinew.bundle import Bundle
from sinew.engine.adapters import with_adapter
from sinew.engine.backend import EngineOptions
from sinew.engine.eager.engine import EagerEngine
from sinew.engine.loading import Storage, load_model, open_device, say_widened


def open_eager(bundle: Bundle, options: EngineOptions) -> EagerEngine:
    """Return the reference engine over the bundle's weights."""
    where = open_device(options)
    model = load_model(bundle, where, options.dtype, Storage(half=bool(options.storage), tables=True))
    say_widened(bundle, model, "eager")
    bundle.release(model.parameters())
    engine = EagerEngine(model, where)
    engine.adapters = {
        name: EagerEngine(with_adapter(model, adapter), where) for name, adapter in options.adapters.items()
    }
    return engine
