"""Generated frames, and the hashes of TensorFlow's results: tests/fixtures/tf_preprocess.json has the SHA-256 of
every stage.

``PYTHONPATH=. python -m tests.processing.tensorflow_frames`` writes this file again. It needs TensorFlow and the
dependencies of this package. The stages are those of OpenVLA-OFT's evaluation: encode, decode, resize, crop.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np

from sinew.families.smolvla.golden.frames import wave, with_noise

RECORDED = Path(__file__).resolve().parents[1] / "fixtures" / "tf_preprocess.json"
SIDE, AREA, QUALITY = 224, 0.9, 95
SIZES = [(256, 256), (240, 320), (480, 640)]


def frame(image: int) -> np.ndarray:
    """Return frame 0, 1 or 2, uint8 [height, width, 3]: a different wave in each colour, with noise."""
    height, width = SIZES[image]
    waves = [wave(height, width, 90, 5 + 17 * colour + 3 * image, 31 - 9 * colour) for colour in range(3)]
    return with_noise(np.stack(waves, axis=-1), 40 + image, 0, 8)


def sha256(array: np.ndarray) -> str:
    """Return the SHA-256 of an array's bytes in C order, as hexadecimal digits."""
    return hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()


def record() -> dict[str, dict[str, str]]:
    """Return the SHA-256 of each stage of each frame, computed with the installed TensorFlow."""
    import tensorflow as tf

    stages = {}
    box = np.sqrt(np.float32(AREA))
    start = (np.float32(1) - box) / np.float32(2)
    for image in range(len(SIZES)):
        given = frame(image)
        decoded = tf.io.decode_image(
            tf.image.encode_jpeg(given, quality=QUALITY), expand_animations=False, dtype=tf.uint8
        )
        floats = tf.image.resize(decoded, (SIDE, SIDE), method="lanczos3", antialias=True)
        resized = tf.cast(tf.clip_by_value(tf.round(floats), 0, 255), tf.uint8)
        cropped = tf.image.crop_and_resize(
            tf.image.convert_image_dtype(resized, tf.float32)[None],
            [[start, start, start + box, start + box]], [0], (SIDE, SIDE),
        )  # fmt: skip
        cropped = tf.clip_by_value(cropped, 0, 1)[0]
        made = {
            "frame": given,
            "jpeg_decoded": decoded.numpy(),
            "resized_float": floats.numpy(),
            "resized_u8": resized.numpy(),
            "crop_float": cropped.numpy(),
            "cropped_u8": tf.image.convert_image_dtype(cropped, tf.uint8, saturate=True).numpy(),
        }
        stages[str(image)] = {name: sha256(array) for name, array in made.items()}
    return {"tensorflow": tf.__version__, "stages": stages}


if __name__ == "__main__":
    RECORDED.write_text(json.dumps(record(), indent=2) + "\n")
