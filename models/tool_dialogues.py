"""Training dialogues with tools for stock and order status: with a call, and without one when none is needed.

Tools and calls are written as the chat template renders them, so that requests look like the training data.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypedDict

from models import wording_delivery_en as delivery_words
from models import wording_series_en as series_words
from models.catalogue import Series, load_catalogue
from models.invent import CARRIERS, WEEKDAYS, invented_price, invented_series
from models.spin import say
from models.tokenizer import call_text, tools_text
from models.turns_en import Turn, roughen

STOCK_NAMES = ("check_stock", "check_stock", "get_stock", "stock", "in_stock", "stock_lookup")
ORDER_NAMES = ("order_status", "order_status", "get_order_status", "track_order", "order_lookup")
_STOCK_TEXTS = (
    "Look up the stock and price of a series.",
    "Whether a series is in stock, and its price.",
    "Stock and price of a manga series in the shop.",
    "Get current stock for a title",
)
_ORDER_TEXTS = (
    "Look up the status of an order.",
    "Where an order is.",
    "Status of a customer's order by its number.",
    "Get the current status of an order",
)
_OTHER_TOOLS = (
    ("open_ticket", "Open a ticket for the support team.", "text"),
    ("get_weather", "Current weather in a city.", "city"),
    ("send_email", "Send an e-mail to the customer.", "body"),
    ("web_search", "Search the web.", "query"),
)
_STOCK_KINDS = ("stock", "stock", "price", "price_stock")
_WORDS = {"in": "in stock", "low": "low stock", "out": "out of stock", "pre": "preorder"}


class Message(TypedDict):
    """One chat message, as the chat template takes it."""

    role: str
    content: str


@dataclass(frozen=True)
class Offer:
    """The tools of one dialogue; the name of a tool that is not offered is ``None``."""

    tools: tuple[Mapping[str, object], ...]
    stock: str | None = None
    title_field: str = "title"
    order: str | None = None
    order_field: str = "order_id"


def _function(rng: random.Random, name: str, text: str, field: str) -> Mapping[str, object]:
    kind: dict[str, object] = {"type": "string"}
    if rng.random() < 0.3:
        kind = {"description": f"The {field.replace('_', ' ')}.", **kind}
    parameters: dict[str, object] = {"type": "object", "properties": {field: kind}, "required": [field]}
    if rng.random() < 0.4:
        parameters["additionalProperties"] = False
    # The gateway sends schemas in canonical order; elsewhere they are in the caller's order.
    ordered = json.loads(json.dumps(parameters, sort_keys=rng.random() < 0.8))
    return {"type": "function", "function": {"name": name, "description": text, "parameters": ordered}}


def _offer(rng: random.Random) -> Offer:
    draw = rng.random()
    stock = rng.choice(STOCK_NAMES) if draw < 0.85 else None
    order = rng.choice(ORDER_NAMES) if draw < 0.6 or draw >= 0.8 else None
    title_field = rng.choice(("title", "title", "series", "name"))
    order_field = rng.choice(("order_id", "order_id", "order", "number"))
    tools = []
    if stock:
        tools.append(_function(rng, stock, rng.choice(_STOCK_TEXTS), title_field))
    if order:
        tools.append(_function(rng, order, rng.choice(_ORDER_TEXTS), order_field))
    if rng.random() < 0.25:
        tools.append(_function(rng, *rng.choice(_OTHER_TOOLS)))
    rng.shuffle(tools)
    return Offer(tuple(tools), stock, title_field, order, order_field)


def _stock_turns(offer: Offer, rng: random.Random) -> list[Message]:
    assert offer.stock is not None
    series: Series = rng.choice(load_catalogue()) if rng.random() < 0.6 else invented_series(rng)
    kind = rng.choice(_STOCK_KINDS)
    stock, price = rng.choice(tuple(_WORDS)), invented_price(rng)
    result: dict[str, object] = {offer.title_field: series.title, "stock": _WORDS[stock], "price": price}
    if rng.random() < 0.3:
        result = {"stock": _WORDS[stock], "price": price}
    slots = {"t": series.title, "price": price}
    line = say(series_words.STOCK[stock], rng, slots)
    cost = f"One volume costs {price} EUR."
    answer = {"stock": line, "price": cost}.get(kind, f"{line.rstrip()} {cost}")
    question = roughen(say(series_words.QUESTIONS[kind], rng, {"t": series.title}), rng)
    return _called(question, offer.stock, {offer.title_field: series.title}, result, answer)


def _order_turns(offer: Offer, rng: random.Random) -> list[Message]:
    assert offer.order is not None
    order = str(rng.randint(1000, 999999))
    day, eta, carrier = rng.choice(WEEKDAYS), rng.choice(WEEKDAYS), rng.choice(CARRIERS)
    if rng.random() < 0.6:
        result = {"status": "shipped", "shipped": day, "carrier": carrier, "arrives": eta}
        answer = say(
            delivery_words.ORDER_SHIPPED_ANSWERS, rng,
            {"order": order, "day": day, "carrier": carrier, "eta": eta},
        )  # fmt: skip
    else:
        result = {"status": "packing", "ships": day}
        answer = say(delivery_words.ORDER_PACKING_ANSWERS, rng, {"order": order, "day": day})
    shown = f"{rng.choice(('#', '', '', 'no. '))}{order}"
    question = roughen(say(delivery_words.ORDER_QUESTIONS, rng, {"order": shown}), rng)
    if order not in question:  # a simulated typo has changed the number
        question = f"where is my order {order}?"
    return _called(question, offer.order, {offer.order_field: order}, result, answer)


def _called(
    question: str, name: str, arguments: Mapping[str, str], result: Mapping[str, object], answer: str
) -> list[Message]:
    return [
        {"role": "user", "content": question},
        {"role": "assistant", "content": call_text(name, arguments)},
        {"role": "tool", "content": json.dumps(result, ensure_ascii=False)},
        {"role": "assistant", "content": answer},
    ]


def tool_dialogue(rng: random.Random, others: Sequence[Turn], system: str | None) -> list[Message]:
    """Return one dialogue with tools; ``others`` are turns that need no earlier turn."""
    offer = _offer(rng)
    messages: list[Message] = [{"role": "system", "content": tools_text(offer.tools)}]
    if system:
        messages.append({"role": "system", "content": system})
    for turn in others:
        draw = rng.random()
        if offer.stock and (draw < 0.35 or turn.kind in _STOCK_KINDS or (not offer.order and draw < 0.6)):
            messages += _stock_turns(offer, rng)
        elif offer.order and (draw < 0.6 or turn.kind == "order"):
            messages += _order_turns(offer, rng)
        else:
            messages += [
                {"role": "user", "content": turn.user},
                {"role": "assistant", "content": turn.assistant},
            ]
    return messages
