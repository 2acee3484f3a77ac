"""Images of data sets as PNG files."""

import io
import struct
import zlib

import numpy as np
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError

MAX_PIXELS = 4096 * 4096  # of one image: a small file may declare a size beyond memory


def encode_png(rgb: NDArray[np.uint8]) -> bytes:
    """Encode an image [h, w, 3] as a PNG file."""
    file = io.BytesIO()
    Image.fromarray(rgb).save(file, "PNG")
    return file.getvalue()


def decode_png(data: bytes) -> NDArray[np.uint8]:
    """Decode a PNG file of RGB to an image [h, w, 3]. ValueError for any other file, and above MAX_PIXELS."""
    try:
        with Image.open(io.BytesIO(data), formats=["PNG"]) as image:
            if image.mode != "RGB":
                raise ValueError(f"the PNG file holds {image.mode}, needed is RGB, into which pillow converts")
            if image.width * image.height > MAX_PIXELS:
                raise ValueError(f"the PNG file has {image.width} x {image.height} pixels, at most {MAX_PIXELS}")
            pixels: NDArray[np.uint8] = np.array(image)
            return pixels
    except UnidentifiedImageError:
        raise ValueError("it is not a PNG file; JPEG and others must be converted, for instance with pillow") from None
    except Image.DecompressionBombError as error:
        raise ValueError(f"the PNG file is too large: {error}") from error
    except (OSError, SyntaxError, EOFError, struct.error, zlib.error) as error:
        raise ValueError(f"the PNG file is damaged: {error}") from error
