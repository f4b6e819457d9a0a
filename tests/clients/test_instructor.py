"""Instructor: answers of a schema in each of its modes for this contract."""

from __future__ import annotations

import openai
import pytest
from pydantic import BaseModel

from tests.clients.shop_worker import MODEL, RECORD
from tests.integration.live import ADMIN_KEY, LiveGateway

instructor = pytest.importorskip("instructor", reason="pip install -e '.[clients]'")


class Record(BaseModel):
    title: str
    copies: int


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("mode", ["TOOLS", "TOOLS_STRICT", "JSON", "JSON_SCHEMA"])
def test_an_answer_of_a_schema(shop: LiveGateway, mode: str, stream: bool) -> None:
    with openai.OpenAI(base_url=f"{shop.url}/v1", api_key=ADMIN_KEY, max_retries=0) as plain:
        client = instructor.from_openai(plain, mode=getattr(instructor.Mode, mode))
        messages = [{"role": "user", "content": "How many copies of Berserk are there?"}]
        asked = {"model": MODEL, "messages": messages, "response_model": Record}
        if stream:
            *_, found = client.chat.completions.create_partial(**asked)
        else:
            found = client.chat.completions.create(**asked, max_retries=1)
    assert (found.title, found.copies) == tuple(RECORD.values())
