"""What reads the images of requests."""

import ssl

from gateway.config.settings import Settings
from gateway.images.fetch import ImageFetcher, NameLookup
from gateway.images.reading import ImageReader


def make_image_reader(settings: Settings) -> ImageReader:
    """It fetches images where a model takes them and the configuration allows it."""
    section = settings.images
    if not section.fetch.enabled or all(model.images is None for model in settings.models.values()):
        return ImageReader(section)
    return ImageReader(
        section,
        ImageFetcher(
            section.fetch, section.max_bytes, look_up=NameLookup(), tls=ssl.create_default_context()
        ),
    )
