"""What reads the images of requests."""

import ssl

from gateway.config.settings import Settings
from gateway.images.fetch import ImageFetcher, NameLookup
from gateway.images.reading import ImageReader
from gateway.requests.body_memory import BodyMemory


def make_image_reader(settings: Settings, bodies: BodyMemory) -> ImageReader:
    """It fetches images where a model takes them and the configuration allows it."""
    section, fetcher = settings.images, None
    if section.fetch and any(model.images is not None for model in settings.models.values()):
        fetcher = ImageFetcher(section, look_up=NameLookup(), tls=ssl.create_default_context())
    return ImageReader(section, bodies.holding, fetcher)
