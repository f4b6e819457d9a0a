"""Shapes as applications ask for them: schemas that pydantic generates, and others that are written out."""

import datetime
import decimal
import enum
import json
import uuid
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Literal

from pydantic import BaseModel, Field, create_model

from gateway.contracts.values import FormatType, ResponseFormat

# ruff: noqa: D101 - the models are examples


class Colour(enum.Enum):
    RED = "red"
    GREEN = "green"


class Address(BaseModel):
    street: str
    city: str = Field(max_length=60)
    postcode: str = Field(pattern=r"^[0-9]{5}(-[0-9]{4})?$")
    country: Literal["JP", "US", "DE"]


class Person(BaseModel):
    name: str = Field(min_length=1, max_length=100)
    age: int = Field(ge=0, le=150)
    email: str | None = None
    address: Address
    tags: list[str] = Field(max_length=10)


class Item(BaseModel):
    sku: str = Field(pattern="^[A-Z]{2}-[0-9]{4,8}$")
    quantity: int = Field(ge=1, le=1000, multiple_of=5)
    price: float = Field(ge=0, le=1e6)


class Order(BaseModel):
    id: uuid.UUID
    at: datetime.datetime
    due: datetime.date
    items: list[Item] = Field(min_length=1, max_length=200)
    colour: Colour
    notes: str = Field(default="", max_length=4000)


class Node(BaseModel):
    value: str
    children: list["Node"] = []


class Cat(BaseModel):
    kind: Literal["cat"]
    lives: int


class Dog(BaseModel):
    kind: Literal["dog"]
    name: str


class Zoo(BaseModel):
    animals: list[Cat | Dog]
    numbers: dict[str, int]


class Step(BaseModel):
    explanation: str
    output: str


class Proof(BaseModel):
    steps: list[Step]
    final_answer: str


class Event(BaseModel):
    kind: Literal["a", "b"]
    duration: datetime.timedelta
    amount: decimal.Decimal


class Review(BaseModel):
    title: str = Field(max_length=200)
    summary: str = Field(max_length=2000)
    sentiment: Literal["positive", "negative", "neutral"]
    score: float = Field(ge=0, le=1)
    entities: list[dict[str, str]]


_MODELS: tuple[type[BaseModel], ...] = (
    *(Address, Person, Order, Node, Zoo, Proof, Event, Review),
    create_model("SixtyOptional", **{f"field_{at}": (str | None, None) for at in range(60)}),  # type: ignore[call-overload]
    create_model("TwoHundred", **{f"field_{at}": (int, ...) for at in range(200)}),  # type: ignore[call-overload]
)


def _tool(name: str) -> dict[str, Any]:
    arguments = {"query": {"type": "string"}, "limit": {"type": "integer", "minimum": 1, "maximum": 100}}
    return {
        "type": "object",
        "properties": {"name": {"const": name}, "arguments": {"type": "object", "properties": arguments}},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


_SCHEMAS: dict[str, Any] = {
    **{model.__name__: model.model_json_schema() for model in _MODELS},
    "labels": {"enum": [f"LABEL_{at}" for at in range(500)]},
    "ids": {"type": "object", "properties": {"id": {"enum": list(range(1000))}}, "required": ["id"]},
    "cents": {"type": "object", "properties": {"price": {"type": "number", "multipleOf": 0.01}}},
    "formats": {
        "type": "object",
        "properties": {
            one: {"type": "string", "format": one} for one in ("date-time", "email", "uri", "ipv6")
        },
    },
    "pair": {"type": "array", "prefixItems": [{"type": "string"}, {"type": "integer"}], "items": False},
    "essay": {"type": "object", "properties": {"essay": {"type": "string", "maxLength": 20_000}}},
    "thousand": {"type": "array", "items": Address.model_json_schema(), "maxItems": 1000},
    "tools": {"anyOf": [_tool(f"tool_{at}") for at in range(64)]},
    "telephone": {"type": "string", "pattern": r"^\+?[1-9]\d{1,14}$"},
}
ORDINARY: Mapping[str, ResponseFormat] = MappingProxyType(
    {
        **{name: ResponseFormat(FormatType.JSON_SCHEMA, json.dumps(one)) for name, one in _SCHEMAS.items()},
        "date": ResponseFormat(FormatType.REGEX, r"\d{4}-\d{2}-\d{2}"),
        "sentence": ResponseFormat(FormatType.REGEX, r"(\w+ ){3,50}\w+\."),
        "sum": ResponseFormat(FormatType.GRAMMAR, 'start: e\ne: t ("+" t)*\nt: /[0-9]+/ | "(" e ")"'),
        "sql": ResponseFormat(FormatType.GRAMMAR, 'root ::= "SELECT " [a-z]+ (", " [a-z]+)* " FROM " [a-z]+'),
        "answer": ResponseFormat(FormatType.CHOICE, '["yes", "no", "maybe"]'),
    }
)
