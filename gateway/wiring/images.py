"""What reads the images of requests."""

import ssl

from gateway.images.fetch import ImageFetcher, NameLookup
from gateway.images.reading import ImageReader
from gateway.wiring.foundation import Foundation


def make_image_reader(base: Foundation) -> ImageReader:
    """It fetches images where a model takes them and the configuration allows it."""
    section, fetcher = base.settings.images, None
    if section.fetch and any(model.images is not None for model in base.settings.models.values()):
        fetcher = ImageFetcher(section, look_up=NameLookup(), tls=ssl.create_default_context())
    return ImageReader(section, base.bodies.holding, fetcher)
