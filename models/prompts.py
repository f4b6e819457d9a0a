"""The parts around a dialogue in the service's prompts: system texts, evidence and volatile context."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

from models.catalogue import STATUS_JA, STOCK_EN, STOCK_JA, Series
from models.invent import CUSTOMERS, WEEKDAYS, surname
from models.spin import say, spin
from models.words import word_list

_ROLES = (
    "You are a (manga shopping|manga shop|helpful manga shop|manga store|friendly bookshop) assistant.",
    "You are the assistant of (a manga shop|an online manga store|Hoshi Manga|a comic shop).",
    "(Help|Assist) customers of (a|our) manga (shop|store).",
    "You (answer|handle) questions about manga, orders, shipping and returns.",
    "Act as a (polite|friendly|concise) shop assistant for manga readers.",
    "あなたは漫画ショップのアシスタントです。",
)
_POLICIES = (
    "Answer only from the catalog(.| and never invent facts.| when catalog lines are given.)",
    "Follow catalog grounding rules.",
    "(Be|Stay) (brief|polite|friendly|concise|accurate).",
    "(Answer|Reply) in the (language of the customer|customer's language).",
    "Do not (discuss|answer) (topics outside|anything outside) the shop.",
    "If (a title|a series|something) is not in the catalog, say so.",
    "Prices are in EUR and (include|contain) tax.",
    "Use (at most|no more than) (three|four|two) sentences.",
    "Never (share|reveal|ask for) (personal data|passwords|payment data).",
    "(Refuse|Decline) (unrelated|off-topic) (requests|questions) politely.",
    "Recommend (two|one or two) series (when asked|if the customer asks).",
    "Do not promise delivery dates that you (can't|do not) know.",
    "Mention (stock|availability) when it (helps|matters).",
    "(Complaints|Damaged books) go to the (support|service) team.",
    "Keep the (tone|style) (warm|neutral|professional) and the (answer|reply) (short|clear).",
    "Use the (newest|latest) catalog line when two lines (disagree|differ).",
    "Refunds follow the return policy of the (shop|store).",
    "(Cite|Use) catalog lines (silently|without quoting the tags).",
    "Do not (show|mention) internal (ids|tags|notes).",
    "(Orders|Parcels) are handled by the (warehouse|logistics) team in (Berlin|Leipzig|Hamburg).",
    "Customers may write in English or Japanese.",
    "A (session|conversation) can hold several (questions|turns).",
)
# Words for passages without meaning for the task: production prompts have text that the model has never seen.
_FILLER = word_list("filler")
_POLICY_HEADS = ("Policy:", "Rules:", "[policy]", "Guidelines:", "# Policy", "Store policy:")
_EVIDENCE_HEADS = (
    "",
    "",
    "",
    "Catalog:",
    "Retrieved catalog entries:",
    "Context from the catalog:",
    "Evidence:",
)


def policy_block(rng: random.Random, rules: int) -> str:
    """``rules`` policy sentences, as one paragraph, as lines or as a numbered list."""
    sentences = [spin(rng.choice(_POLICIES), rng) for _ in range(rules)]
    shape = rng.random()
    head = rng.choice(_POLICY_HEADS)
    if shape < 0.4:
        return " ".join(sentences)
    if shape < 0.6:
        return f"{head} " + " ".join(sentences)
    if shape < 0.8:
        return "\n".join([head, *(f"- {sentence}" for sentence in sentences)])
    return "\n".join([head, *(f"{number}. {sentence}" for number, sentence in enumerate(sentences, 1))])


def filler_block(rng: random.Random, sentences: int) -> str:
    """Return sentences of unrelated words and made-up names, which the model must learn to ignore."""
    out = []
    for _ in range(sentences):
        words = [
            surname(rng) if rng.random() < 0.08 else rng.choice(_FILLER) for _ in range(rng.randint(4, 14))
        ]
        if rng.random() < 0.2:
            words.append(str(rng.randint(0, 5000)))
        text = " ".join(words)
        out.append(text[:1].upper() + text[1:] + ".")
    return " ".join(out)


def system_text(rng: random.Random, long: bool = False) -> str:
    """A system text: a role, often followed by some policy; ``long`` gives several hundred tokens of it."""
    role = say(_ROLES, rng)
    if long:
        blocks = [
            (
                filler_block(rng, rng.randint(3, 14))
                if rng.random() < 0.4
                else policy_block(rng, rng.randint(6, 14))
            )
            for _ in range(rng.randint(2, 7))
        ]
        return "\n\n".join([role, *blocks])
    if rng.random() < 0.45:
        return role
    gap = rng.choice((" ", "\n", "\n\n"))
    if rng.random() < 0.12:
        return role + gap + filler_block(rng, rng.randint(1, 5))
    return role + gap + policy_block(rng, rng.randint(1, 5))


def _tag(rng: random.Random, kind: str) -> str:
    """Return the bracketed id at the start of an evidence line."""
    number = rng.randint(1, 999)
    return rng.choice(
        (f"[{kind} manga_{number}]", f"[{kind} manga_{number}]", f"[{kind} {number}]", f"[doc {number}]")
    )


def catalogue_line(series: Series, rng: random.Random, japanese: bool = False) -> str:
    """One retrieval chunk: author, volumes, genre, stock and price, and sometimes publisher and status."""
    tag = _tag(rng, "catalog")
    if japanese and rng.random() < 0.35:
        return catalogue_line(replace(series, title=series.title_ja, author=series.author_ja), rng)
    if japanese:
        status = f"、{STATUS_JA[series.status]}"
        return (
            f"{tag} {series.title_ja}、{series.author_ja}、{series.volumes}巻、{series.genre_ja}{status}、"
            f"{STOCK_JA[series.stock]}、{series.price}ユーロ"
        )
    stock = STOCK_EN[series.stock]
    status = "" if series.status == "complete" and rng.random() < 0.5 else f", {series.status}"
    publisher = f", {series.publisher}" if rng.random() < 0.4 else ""
    shape = rng.random()
    if shape < 0.7:
        return (
            f"{tag} {series.title} by {series.author}, {series.volumes} volumes,"
            f" {series.genre}{status}{publisher}, {stock}, {series.price} EUR"
        )
    if shape < 0.85:
        return (
            f"{tag} {series.title} | {series.author} | {series.genre} | {series.volumes}"
            f" volumes{status}{publisher} | {stock} | {series.price} EUR"
        )
    return (
        f"{tag} title: {series.title}; author: {series.author}; genre: {series.genre}; volumes:"
        f" {series.volumes}{status}; stock: {stock}; price: {series.price} EUR"
    )


def evidence_block(lines: Sequence[str], rng: random.Random) -> str:
    """The evidence lines under one of the usual headings, or none."""
    head = rng.choice(_EVIDENCE_HEADS)
    return "\n".join([head, *lines] if head else lines)


def context_line(rng: random.Random, customer: str | None) -> str:
    """The volatile tail of a prompt: the time and perhaps the customer's name."""
    clock = f"{rng.randint(0, 23):02d}:{rng.randint(0, 59):02d}"
    date = f"{rng.randint(2024, 2027)}-{rng.randint(1, 12):02d}-{rng.randint(1, 28):02d}"
    who = f" {rng.choice(('Customer', 'User', 'Name'))}: {customer}." if customer else ""
    return rng.choice(
        (
            f"Current time: {date} {clock}.{who}",
            f"[context] {date}T{clock}{who}",
            f"Now: {rng.choice(WEEKDAYS)} {clock}.{who} Session {rng.randint(1000, 9999)}.",
            f"Time: {date} {clock} UTC.{who} Locale: {rng.choice(('en', 'de', 'fr', 'ja'))}.",
        )
    )


def customer_name(rng: random.Random) -> str:
    """A first name for the context line."""
    return rng.choice(CUSTOMERS)
