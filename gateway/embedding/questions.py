"""Makes the vectors of the response cache's questions with the journey of embedding requests."""

from base64 import b64decode
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from gateway.contracts.embeddings import EmbeddingsRequest
from gateway.contracts.values import Caller, CallerRole
from gateway.embedding.journey import EmbeddingJourney
from resilience.response_cache_values import EmbedderError

KEY_ID: Final = "response_cache"  # the key id in the ledger's rows of these requests


@dataclass(frozen=True, slots=True)
class QuestionEmbedder:
    """Implements :class:`resilience.response_cache_values.Embedder`.

    The ledger's rows name the tenant that asked but are billed to nobody. No key's limits apply to them.
    """

    journey: EmbeddingJourney
    clock: Callable[[], float]
    new_id: Callable[[str], str]

    async def embed(self, tenant: str, model: str, texts: Sequence[str]) -> Sequence[bytes]:
        """A vector for each text. Raises EmbedderError."""
        request = EmbeddingsRequest(
            request_id=self.new_id("req"),
            generation_id=self.new_id("gen"),
            caller=Caller(tenant, CallerRole.OPERATOR, KEY_ID),
            arrived_at=self.clock(),
            created=0,
            model=model,
            inputs=tuple(texts),
            for_cache=True,
        )
        try:
            answer = await self.journey.run(request)
        except Exception as error:
            raise EmbedderError(type(error).__name__) from error
        return [b64decode(vector) for vector in answer.results]
