"""Images in chat messages: where they may come from, how large they may be, and that they are images at all. What
passes is a data URL in one form; SGLang's processors never see an address or a path."""

from __future__ import annotations

import asyncio
import base64
import binascii
import io
from typing import Any, Final

from PIL import Image, UnidentifiedImageError

from prism.config.sections.server import ImageConfig
from prism.config.units import format_size
from prism.server.errors import ApiError, invalid
from prism.server.image_fetch import ImageFetcher

FORMATS: Final = ("PNG", "JPEG", "WEBP", "GIF", "BMP")


async def take_images(request: Any, limits: ImageConfig, fetcher: ImageFetcher, takes_images: bool) -> int:
    """Checks every content part of a chat ``request`` that is no text, and replaces addresses by what is there. Returns
    how many images there are; raises :class:`ApiError` (400) naming the part. ``takes_images``: the model does."""
    found, takes_images = 0, takes_images and limits.max_count > 0
    for index, message in enumerate(getattr(request, "messages", None) or ()):
        content = getattr(message, "content", None)
        for number, part in enumerate(content if isinstance(content, list) else ()):
            kind = getattr(part, "type", None)
            if kind == "text":
                continue
            where = f"messages.{index}.content"
            if kind != "image_url" or not takes_images:
                what = "texts and images" if takes_images else "text only"
                raise invalid(f"This model takes {what}, not {kind!r}.", where, "unsupported_content")
            where = f"{where}.{number}"
            found += 1
            if found > limits.max_count:
                raise invalid(f"A request may have {limits.max_count} images.", where)
            await _take(part.image_url, limits, fetcher, where)
    return found


async def _take(image: Any, limits: ImageConfig, fetcher: ImageFetcher, where: str) -> None:
    where = f"{where}.image_url.url"
    if image.max_dynamic_patch is not None or image.min_dynamic_patch is not None:
        raise invalid("'max_dynamic_patch' and 'min_dynamic_patch' are not supported by this server.", where)
    if image.url[:5].lower() == "data:":
        data = decode_data_url(image.url, limits, where)
    else:
        data = await fetcher.fetch(image.url, where)
    kind = await asyncio.to_thread(check_image, data, limits, where)
    image.url = f"data:image/{kind.lower()};base64,{base64.b64encode(data).decode()}"


def decode_data_url(url: str, limits: ImageConfig, where: str) -> bytes:
    """The bytes in ``data:image/...;base64,...``. Raises :class:`ApiError`."""
    head, comma, coded = url.partition(",")
    kind, *options = head[5:].lower().split(";")
    if not comma or not kind.startswith("image/") or "base64" not in options:
        raise invalid("An image must be written as 'data:image/png;base64,...'.", where)
    if len(coded) > -(-int(limits.max_bytes) // 3) * 4:
        raise _too_large(limits, where)
    try:
        data = base64.b64decode(coded, validate=True)
    except (binascii.Error, ValueError):
        raise invalid("The image is not valid base64.", where) from None
    if len(data) > limits.max_bytes:
        raise _too_large(limits, where)
    return data


def check_image(data: bytes, limits: ImageConfig, where: str) -> str:
    """Its format. Decodes all of it, after a look at its size; raises :class:`ApiError`."""
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            pixels = image.width * image.height
            if pixels > limits.max_pixels:
                size = f"{image.width} x {image.height}"
                raise invalid(f"The image has {size} pixels; {limits.max_pixels} in all are allowed.", where)
            image.load()
            return str(image.format)
    except UnidentifiedImageError:
        raise invalid(f"This is no image in a known format ({', '.join(FORMATS)}).", where) from None
    except ApiError:
        raise
    except (OSError, ValueError, SyntaxError, IndexError, Image.DecompressionBombError) as error:
        raise invalid(f"The image cannot be read: {error}.", where) from None


def _too_large(limits: ImageConfig, where: str) -> ApiError:
    return invalid(f"An image may have {format_size(int(limits.max_bytes))}.", where)
