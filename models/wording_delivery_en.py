"""English questions and answers about deliveries and orders."""

from __future__ import annotations

# Delivery zones: business days, cost in EUR, countries.
ZONES: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "de": ("1-2", "2.90", ("Germany",)),
    "eu": (
        "3-5",
        "4.90",
        ("France", "Spain", "Italy", "Austria", "Poland", "Sweden", "Belgium", "Portugal", "the Netherlands",
         "Denmark", "Finland", "Ireland", "Greece", "Czechia"),
    ),
    "uk": ("4-6", "6.90", ("the UK", "England", "Norway", "Switzerland")),
    "na": ("7-10", "12.90", ("the US", "the USA", "Canada", "the United States")),
    "asia": ("6-9", "11.90", ("Japan", "South Korea", "Singapore", "Taiwan")),
    "au": ("9-12", "13.90", ("Australia", "New Zealand")),
}  # fmt: skip
NO_DELIVERY = ("Brazil", "India", "South Africa", "Egypt", "Argentina", "Turkey")

SHIP_TO_QUESTIONS: tuple[str, ...] = (
    "how many days (does it take|do you need) to {place}?",
    "what (does it cost|do I pay) to (ship|send) (a book|books|an order) to {place}?",
    "(is|are) {place} (in your delivery area|covered|served)?",
    "I (want|need) a (book|parcel|package) (sent|delivered) to {place}.",
    "(postage|delivery|parcel) to {place}: (cost|time|price)?",
    "how long does (shipping|delivery) (to|take to) {place} (take|)?",
    "(do|can) you (ship|deliver|send) (books|manga|orders|) to {place}?",
    "how much (is|does) (shipping|delivery) to {place} (cost|)?",
    "(what are|what is) the (shipping costs|delivery time|shipping time) (to|for) {place}?",
    "I live in {place}. (How long does delivery take?|Do you ship here?|How much is shipping?)",
    "when (would|will) (my|an) order (arrive|get) (in|to) {place}?",
    "shipping to {place}?",
)
SHIP_TO_FOLLOW_UPS: tuple[str, ...] = (
    "and to {place}?",
    "what about {place}?",
    "and for {place}?",
    "and {place}?",
)
SHIP_TO_ANSWERS: tuple[str, ...] = (
    "Delivery to {place} takes {days} business days and costs {cost} EUR.",
    "Yes, we ship to {place}. It takes {days} business days and costs {cost} EUR.",
    "Orders to {place} arrive in {days} business days. Shipping costs {cost} EUR.",
    "For {place} shipping is {cost} EUR, and delivery takes {days} business days.",
)
NO_DELIVERY_ANSWERS: tuple[str, ...] = (
    "Sorry, we don't ship to {place} (yet|at the moment).",
    "We do not deliver to {place} at the moment, sorry.",
)

ORDER_QUESTIONS: tuple[str, ...] = (
    "(is there an update|update) (on|for) (my |)order {order}?",
    "when (will|does) order {order} (arrive|come)?",
    "I am waiting for order {order}.",
    "(tracking|status) {order}?",
    "my (package|order) {order} is (late|missing).",
    "where is my order {order}?",
    "(what is|what's) the status of (my |)order {order}?",
    "(can you|could you|please) (check|track|look up) (my |)order {order}",
    "(has|did) (my |)order {order} (shipped|ship|been sent) (yet|already|)?",
    "order {order}, where is it?",
    "I (placed|made) order {order} last week and (nothing came|it has not arrived).",
)
ORDER_UNKNOWN_ANSWERS: tuple[str, ...] = (
    (
        "I can't see the status of order {order} here. Please use the tracking link in your e-mail (or write"
        " to help@hoshi.example|)."
    ),
    "I have no tracking data for order {order} in this chat. The tracking link is in your shipping e-mail.",
)
ORDER_PLAIN_QUESTIONS: tuple[str, ...] = (
    "(is there an update|update) on my (order|package)?",
    "I am (still|) waiting for my (order|package|parcel).",
    "my (package|order|parcel) is (late|missing).",
    "where is my (order|package|parcel)?",
    "(how do I|how can I|can I) track my (order|package|parcel)?",
    "has my order (shipped|been sent) (yet|)?",
    "what is the status of my order?",
)
ORDER_PLAIN_ANSWERS: tuple[str, ...] = (
    "You can track your order with the link in your shipping e-mail. Do you have the order number?",
    "Please open the tracking link in your shipping e-mail, or tell me the order number.",
)
ORDER_SHIPPED_ANSWERS: tuple[str, ...] = (
    "Order {order} was shipped on {day} with {carrier} and should arrive on {eta}.",
    "Your order {order} is on its way with {carrier}. It was shipped on {day} and should arrive on {eta}.",
)
ORDER_PACKING_ANSWERS: tuple[str, ...] = (
    "Order {order} is being packed and ships on {day}.",
    "We are packing order {order} right now. It ships on {day}.",
)
