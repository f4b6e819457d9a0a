"""English questions by meaning: all of one entry ask for the same, those of any two entries do not.

``{x}`` is a name or another word that both questions must share. Options in brackets are synonyms, unlike
those in the demo model's wording, which may also be other cases of one topic.
"""

from __future__ import annotations

_TELL = "(can you tell me|could you tell me|do you know|tell me|please tell me|I want to know|I would like to know|let me know|any idea|remind me)"  # noqa: E501

QUESTIONS: dict[str, tuple[str, ...]] = {
    "author": (
        "who is the (author|creator) of {x}?",
        f"{_TELL} who (created|made|authored|invented) {{x}}?",
        "who (created|made|authored|invented|came up with) {x}?",
        "(which|what) (person|mangaka|author) (created|made|authored) {x}?",
        "(what is|give me) the name of the (author|creator) of {x}?",
        "{x} was (created|made|authored) by (whom|who)?",
        "(name|please name) the (author|creator) of {x}.",
        "{x} is by (whom|who)?",
        "whose (idea|work|creation) is {x}?",
        "{x} (author|creator)?",
        "who is (behind|the person behind|the mangaka behind) {x}?",
        "by (whom|who) was {x} (created|made)?",
    ),
    "writer": (
        "who (wrote|has written) {x}?",
        f"{_TELL} who (wrote|has written) {{x}}?",
        "who is the writer of {x}?",
        "(which|what) (person|author|mangaka) (wrote|has written) {x}?",
        "{x} was written by (whom|who)?",
        "by (whom|who) was {x} written?",
        "{x} writer?",
    ),
    "artist": (
        "who (drew|illustrated|has drawn) {x}?",
        f"{_TELL} who (drew|illustrated) {{x}}?",
        "who is the (artist|illustrator) of {x}?",
        "{x} was (drawn|illustrated) by (whom|who)?",
        "(which|what) (artist|mangaka) (drew|illustrated) {x}?",
        "{x} (artist|illustrator)?",
    ),
    "volumes": (
        "how many (volumes|books|tankobon) (are there|are there of|are there in|are in) {x}?",
        "how many (volumes|books|tankobon) does {x} (have|run for|span|count|comprise)?",
        f"{_TELL} how many (volumes|books|tankobon) {{x}} has?",
        "{x} has how many (volumes|books)?",
        "(what is|give me) the (number of volumes|volume count|number of books) (of|in|for) {x}?",
        "how many (volumes|books) (in total|overall|altogether|all in all) (does {x} have|for {x})?",
        "(count|please count) the (volumes|books) of {x}.",
        "{x} (volume count|number of volumes|number of books)?",
        "{x}: how many (volumes|books)?",
        "into how many (volumes|books|tankobon) was {x} collected?",
        "how many (volumes|books) do I need (to own|for) (all|the whole|the complete set) of {x}?",
        "(what number|which number) of (volumes|books) does {x} have?",
    ),
    "finished": (
        "is {x} (finished|complete|completed|concluded) (already|yet|by now|)?",
        "has {x} (finished|ended|concluded|been completed|come to an end) (already|yet|)?",
        f"{_TELL} (if|whether) {{x}} (is finished|is complete|is completed|has ended|has concluded)?",
        "did {x} (finish|end|conclude|wrap up|come to an end) (already|yet|)?",
        "is the (story|series|manga) {x} (finished|complete|over|concluded)?",
        "does {x} have an ending (already|yet|)?",
        "has the (story|series|manga) {x} (ended|finished|concluded)?",
    ),
    "ongoing": (
        "is {x} (still|) (ongoing|running|continuing|being published) (at the moment|right now|)?",
        "is {x} still (ongoing|running|going|being published|going on)?",
        f"{_TELL} (if|whether) {{x}} is (still|) (ongoing|running|being published)?",
        "does {x} (still|) (continue|run|go on)?",
        "(are|do) new volumes of {x} (still|) (coming out|come out|appear)?",
    ),
    "price": (
        "how much (is|does it cost|do you charge for) {x}?",
        "how much does {x} cost?",
        "(what is|give me|tell me) the (price|cost) of {x}?",
        f"{_TELL} (the price of {{x}}|what {{x}} costs|how much {{x}} costs|how much {{x}} is)?",
        "what does {x} cost?",
        "what (would I pay|do I pay|do I have to pay|must I pay) for {x}?",
        "{x} (price|cost)?",
        "how much (money|) (do I pay|would I pay|must I pay|do I have to pay) for {x}?",
        "at (what|which) price (do you sell|can I buy|is) {x}?",
        "what is {x} (priced at|selling for|going for)?",
    ),
    "volume_price": (
        "how much (is|for) (one|a|a single) (volume|book) of {x}?",
        "how much does (one|a|a single) (volume|book) of {x} cost?",
        "what does (one|a|a single) (volume|book) of {x} cost?",
        "(what is|tell me) the (price|cost) of (one|a|a single) (volume|book) of {x}?",
        "what (would I pay|do I pay|do I have to pay) for (one|a|a single) (volume|book) of {x}?",
        "(price|cost) per (volume|book) of {x}?",
    ),
    "expensive": (
        "is {x} (expensive|costly|pricey)?",
        f"{_TELL} (if|whether) {{x}} is (expensive|costly|pricey)?",
        "does {x} cost (a lot|much)?",
    ),
    "cheap": (
        "is {x} (cheap|inexpensive|affordable|budget friendly)?",
        f"{_TELL} (if|whether) {{x}} is (cheap|inexpensive|affordable)?",
    ),
    "stock": (
        "do you have {x} (in stock|available|in store|) (right now|at the moment|currently|now|)?",
        "is {x} (available|in stock|in store) (right now|at the moment|currently|now|)?",
        "have you got {x} (in stock|available|)?",
        "(what is|tell me) the availability of {x}?",
        f"{_TELL} (if|whether) (you have {{x}}|{{x}} is available|{{x}} is in stock)?",
        "can I (buy|get|purchase) {x} (from you|here|) (right now|at the moment|now|)?",
        "do you (sell|carry|stock) {x}?",
        "{x} (in stock|available)?",
        "are there (any|) copies of {x} (left|available)?",
        "could I (buy|get|purchase) {x} (from you|here|)?",
    ),
    "volumes_in_stock": (
        "how many (volumes|books|copies) of {x} (are in stock|do you have|are available|are left)?",
        f"{_TELL} how many (volumes|books|copies) of {{x}} (you have|are in stock|are available)?",
        "how many (volumes|books|copies) of {x} do you have (in stock|available|left)?",
    ),
    "you_buy": (
        "do you (buy|purchase) {x}?",
        "can I sell (you|) {x}?",
        "would you (buy|purchase) {x} (from me|)?",
    ),
    "sold_out": (
        "is {x} (sold out|out of stock|unavailable|gone)?",
        f"{_TELL} (if|whether) {{x}} is (sold out|out of stock)?",
        "have you run out of {x}?",
    ),
    "publisher": (
        "who (publishes|releases|puts out|is the publisher of) {x}?",
        "(which|what) (publisher|company|publishing house) (publishes|releases|puts out) {x}?",
        "(what is|tell me|name) the publisher of {x}?",
        f"{_TELL} who (publishes|releases) {{x}}?",
        "{x} publisher?",
        "by (whom|which company|which publisher) is {x} published?",
        "{x} is published by (whom|who)?",
    ),
    "genre": (
        "(what|which) genre (is|does it have) {x}?",
        "(what|which) genre does {x} (belong to|fall into|have)?",
        "(what is|tell me|name) the genre of {x}?",
        f"{_TELL} (what|which) genre {{x}} is?",
        "{x} (falls into|belongs to|is in) (which|what) genre?",
        "{x} genre?",
        "what (kind|type|sort) of (manga|series|book) is {x}?",
        "under (which|what) genre do you (list|file) {x}?",
    ),
    "about": (
        "what is {x} about?",
        "what is the (plot|story|storyline) of {x}?",
        f"{_TELL} what {{x}} is about?",
        "what happens in {x}?",
        "(summarize|summarise|sum up|outline) (the plot of|the story of|) {x} (for me|please|).",
        "give me (a summary|a short summary|an overview|a quick summary) of {x}.",
        "what is the (manga|series|book) {x} about?",
        "(can you|could you) (summarize|summarise|sum up|outline) {x} (for me|please|)?",
    ),
    "like": (
        "(can you|could you|please) (recommend|suggest) (something|a manga|a series) (like|similar to) {x}?",
        "(what|which) (manga|series) (is|are) (like|similar to) {x}?",
        "(something|anything) (like|similar to) {x}?",
        "I (loved|liked|enjoyed) {x}. What should I read now?",
        "(what|which manga) (would you|do you|can you) (recommend|suggest) to (fans|readers) of {x}?",
        "(I want|I am looking for|show me|do you have) (something|a manga|a series) (like|similar to) {x}.",
        "(what|which manga) (would you|do you|can you) (recommend|suggest) if I (liked|loved|enjoyed) {x}?",
        "(what|which manga) (resembles|comes close to) {x}?",
    ),
    "works": (
        "(what|which) (manga|series|books) (do you have|are there) by {x}?",
        "(do you have|show me|I am looking for|have you got) (manga|books|series|works) by {x}.",
        "(list|name|show me) the (manga|books|series|works) of {x}.",
        "(what|which manga|which series) (did|has) {x} (write|written|create|created)?",
    ),
    "order_where": (
        "where is my (order|parcel|package)?",
        "where is (order|my order) {x}?",
        "(what is|tell me) the status of (order|my order) {x}?",
        "(can you|could you|please) (check|track|look up) (order|my order) {x}?",
        f"{_TELL} where my (order|parcel|package) {{x}} is?",
        "order {x}: where is it?",
        "(what is|tell me) the status of my (order|parcel|package)?",
        "(has|did) my (order|parcel|package) {x} (shipped|ship|been sent|been shipped) (yet|already|)?",
        "order {x} status?",
    ),
    "order_track": (
        "how (do I|can I|could I) track my (order|parcel|package)?",
        f"{_TELL} how to track my (order|parcel|package)?",
        "can I track my (order|parcel|package)?",
        "is there a way to track my (order|parcel|package)?",
    ),
    "shipping_time": (
        "how long does (shipping|delivery) (usually|normally|) take?",
        "(what is|what are) your (shipping|delivery) (time|times)?",
        "how many days does (shipping|delivery) take?",
        "how (fast|quickly) do you (ship|deliver)?",
        "when will my (order|parcel|package|books) (arrive|come|be delivered)?",
        f"{_TELL} how long (shipping|delivery) takes?",
        "how long (do I|must I) wait for my (order|parcel|package|books)?",
        "(shipping|delivery) (time|duration)?",
        "how soon will my (order|parcel|package|books) (arrive|come|be delivered)?",
    ),
    "shipping_cost": (
        "how much (is|does it cost for) (shipping|delivery|postage)?",
        "how much does (shipping|delivery|postage) cost?",
        "(what are|tell me) (your|the) (shipping|delivery) (costs|fees|charges)?",
        "what do (I|you) (pay|charge) for (shipping|delivery|postage)?",
        f"{_TELL} (what (shipping|delivery|postage) costs|the cost of (shipping|delivery))?",
        "(shipping|delivery|postage) (price|cost|costs|fee)?",
        "what does (shipping|delivery|postage) cost?",
    ),
    "shipping_free": (
        "is (shipping|delivery|postage) free?",
        "do you (have|offer|provide) free (shipping|delivery)?",
        "(when|from what amount) is (shipping|delivery|postage) free?",
        "is there free (shipping|delivery)?",
    ),
    "ship_to": (
        "do you (ship|deliver|send) (books|orders|manga|) to {x}?",
        "can you (ship|deliver|send) (books|orders|manga|) to {x}?",
        "is (shipping|delivery) to {x} possible?",
        f"{_TELL} (if|whether) you (ship|deliver) to {{x}}?",
        "(is it possible|would it be possible) to (ship|deliver) to {x}?",
    ),
    "ship_to_time": (
        "how long does (shipping|delivery) to {x} take?",
        "how many days does (shipping|delivery) to {x} take?",
        "(what is|tell me) the (shipping|delivery) time to {x}?",
        "how long (until|till) my (order|parcel|package) (arrives|comes) in {x}?",
        "(shipping|delivery) time to {x}?",
    ),
    "ship_to_cost": (
        "how much (is|does it cost for) (shipping|delivery|postage) to {x}?",
        "how much does (shipping|delivery|postage) to {x} cost?",
        "(what are|tell me) the (shipping|delivery) (costs|fees|charges) to {x}?",
        "what does (shipping|delivery|it cost to ship) to {x} (cost|)?",
        "(shipping|delivery|postage) (price|cost|costs|fee) to {x}?",
    ),
    "return_how": (
        "how (do I|can I|could I|should I) (return|send back) (a book|an order|something|an item|my order)?",
        f"{_TELL} how to (return|send back) (a book|an order|something|an item)?",
        "how does (returning|a return) (a book|an order|an item|) work?",
        "(what is|explain) the (way|procedure|process) to (return|send back) (a book|an order|an item)?",
        "how do (returns|your returns) work?",
    ),
    "return_can": (
        "can I (return|send back) (a book|an order|something|an item|my order)?",
        "(is it possible|am I allowed) to (return|send back) (a book|an order|something|an item)?",
        "do you (accept|take|allow) returns?",
        "may I (return|send back) (a book|an order|something|an item)?",
        "can (a book|an order|an item) be (returned|sent back)?",
    ),
    "return_deadline": (
        "how (long|many days) do I have to (return|send back) (a book|an order|something|an item)?",
        "(what is|tell me) the (return window|return period|return deadline|time limit for returns)?",
        "(until when|how late) can I (return|send back) (a book|an order|something|an item)?",
        "within how many days can I (return|send back) (a book|an order|an item)?",
    ),
    "return_policy": (
        "(what is|tell me|explain) your (return policy|returns policy)?",
        "(return policy|returns policy)?",
        f"{_TELL} (your|the) return policy?",
    ),
    "refund_when": (
        "when (do I|will I) (get|receive) my (refund|money back)?",
        "how long does (a|the|my) refund take?",
        "when (is|will be) my (refund|money) (paid|paid back|returned)?",
        "how (many days|long) until (my|the) refund (arrives|comes|is paid)?",
        "how soon (do I|will I) (get|receive) my (refund|money back)?",
    ),
    "refund_want": (
        "I (want|need|would like|demand) (a refund|my money back).",
        "(please|can you|could you) (refund me|give me a refund|give me my money back).",
        "can I (get|have) (a refund|my money back)?",
    ),
    "cancel_how": (
        "how (do I|can I|could I) cancel (my|an) order?",
        f"{_TELL} how to cancel (my|an) order?",
        "(what is|explain) the way to cancel (my|an) order?",
    ),
    "cancel_want": (
        "(please|can you|could you) cancel my order (for me|)?",
        "I (want|need|would like) to cancel my order.",
        "cancel my order (please|).",
    ),
    "hours": (
        "(what are|tell me) your (opening hours|opening times|business hours)?",
        "when (are you|is the shop|is your shop|is your store) open?",
        "(opening hours|opening times|business hours)?",
        f"{_TELL} (your|the) (opening hours|opening times|business hours)?",
        "(during which|at what) hours are you open?",
    ),
    "opens": (
        "(when|at what time|what time) (do you|does the shop|does your store) open?",
        f"{_TELL} when (you open|the shop opens|your store opens)?",
    ),
    "closes": (
        "(when|at what time|what time) (do you|does the shop|does your store) close?",
        f"{_TELL} when (you close|the shop closes|your store closes)?",
        "how late are you open?",
    ),
    "where_shop": (
        "where is your (shop|store)?",
        "(what is|tell me) the (address|location) of your (shop|store)?",
        f"{_TELL} where your (shop|store) is?",
        "where are you located?",
        "where can I find your (shop|store)?",
    ),
    "contact": (
        "how (can I|do I|could I) (contact|reach) (you|support|customer service|the support|your team)?",
        f"{_TELL} how to (contact|reach) (you|support|customer service)?",
        "(what is|tell me) the best way to (contact|reach) (you|support|customer service)?",
        "how do I get in touch with (you|support|customer service|your team)?",
        "(what is|give me) your (contact address|contact information)?",
    ),
    "payment_methods": (
        "(which|what) payment (methods|options) do you (accept|have|offer|take|support)?",
        "how can I pay?",
        "(what are|tell me) (your|the) payment (methods|options)?",
        "what (ways|forms) of payment do you (accept|take|support)?",
        "in which ways can I pay?",
    ),
    "pay_by": (
        "can I pay (with|by|using) {x}?",
        "do you (accept|take|support) {x}?",
        "is (payment with|payment by|paying by) {x} (possible|accepted)?",
        "(is it possible|am I able) to pay (with|by|using) {x}?",
    ),
    "how_to": (
        "how (do I|can I|could I|should I|do you|does one) {x} {y}?",
        f"{_TELL} how to {{x}} {{y}}?",
        "(what is|explain|show me) the (way|procedure|process) to {x} {y}?",
        "(please|) (explain|show me) how to {x} {y}.",
        "(what is the best way|is there a way) to {x} {y}?",
    ),
    "can_one": (
        "can I {x} {y}?",
        "(is it possible|am I able|would it be possible) to {x} {y}?",
        f"{_TELL} (if|whether) I can {{x}} {{y}}?",
        "could I {x} {y}?",
    ),
    "must_one": (
        "(do I need|do I have|am I required|am I obliged) to {x} {y}?",
        "must I {x} {y}?",
        f"{_TELL} (if|whether) I (need to|have to|must) {{x}} {{y}}?",
    ),
    "should_one": (
        "should I {x} {y}?",
        "(is it a good idea|would you advise me|is it wise) to {x} {y}?",
        "(would it be|is it) (better|good) to {x} {y}?",
    ),
    "what_is": (
        "what is (a|an|the|) {x}?",
        "what (does|is the meaning of) {x} (mean|)?",
        "(please|) (explain|define) {x} (to me|for me|).",
        f"{_TELL} what {{x}} (is|means)?",
        "(can you|could you) (explain|define) {x} (to me|for me|)?",
        "what is the (meaning|definition) of {x}?",
    ),
    "who_is": (
        "who is {x}?",
        f"{_TELL} who {{x}} is?",
    ),
    "where_is": (
        "where is {x}?",
        f"{_TELL} where {{x}} is (located|)?",
        "where (can I find|do I find) {x}?",
        "(what is|tell me) the location of {x}?",
        "where is {x} located?",
    ),
    "when_is": (
        "when is {x}?",
        f"{_TELL} when {{x}} is?",
        "(what is|tell me) the date of {x}?",
        "on (what|which) (date|day) is {x}?",
    ),
    "when_does": (
        "(when|at what time|what time) does {x} {y}?",
        f"{_TELL} (when|at what time) {{x}} {{y}}?",
    ),
    "why_is": (
        "why is {x} {y}?",
        f"{_TELL} why {{x}} is {{y}}?",
        "(for what reason|how come) is {x} {y}?",
        "(what is|explain) the reason that {x} is {y}?",
        "(please|) explain why {x} is {y}.",
    ),
    "is_it": (
        "(is|are) {x} {y}?",
        f"{_TELL} (if|whether) {{x}} (is|are) {{y}}?",
        "would you say that {x} is {y}?",
        "is it true that {x} (is|are) {y}?",
    ),
    "how_old": (
        "how old is {x}?",
        "(what is|tell me) the age of {x}?",
        f"{_TELL} how old {{x}} is?",
    ),
    "how_many": (
        "how many {x} does {y} have?",
        f"{_TELL} how many {{x}} {{y}} has?",
        "(what is|tell me) the number of {x} {y} has?",
        "how many {x} are there in {y}?",
    ),
    "difference": (
        "(what is|explain|tell me) the difference between {x} and {y}?",
        "how (do|does) {x} and {y} differ?",
        f"{_TELL} the difference between {{x}} and {{y}}?",
        "in what way do {x} and {y} differ?",
        "how is {x} different from {y}?",
    ),
}

# What is asked of anything at all: it keeps `why does`, `when does` and `does` apart.
_ASKING = {"if": "(if|whether)", "how": "how", "why": "(why|how come)", "when": "when", "where": "where"}
_AUXILIARIES = ("is", "was", "does", "did", "has", "will", "can", "should", "would", "must")


def _frames() -> dict[str, tuple[str, ...]]:
    frames: dict[str, tuple[str, ...]] = {}
    for asking, words in _ASKING.items():
        for auxiliary in _AUXILIARIES:
            first = words if asking != "if" else ""
            frames[f"{asking}_{auxiliary}_it"] = (
                f"{first} {auxiliary} {{x}} {{y}}?",
                f"{_TELL} {words} {{x}} {auxiliary} {{y}}?",
                f"{first} {auxiliary} the {{x}} {{y}}?",
            )
            if auxiliary in ("can", "should", "must", "would", "will"):
                frames[f"{asking}_{auxiliary}_I"] = (
                    f"{first} {auxiliary} I {{x}} {{y}}?",
                    f"{_TELL} {words} I {auxiliary} {{x}} {{y}}?",
                    f"{first} {auxiliary} I {{x}} my {{y}}?",
                )
                frames[f"{asking}_{auxiliary}_you"] = (
                    f"{first} {auxiliary} you {{x}} {{y}}?",
                    f"{_TELL} {words} you {auxiliary} {{x}} {{y}}?",
                )
        for who in ("I", "you", "they"):
            frames[f"{asking}_do_{who}"] = (
                f"{first if asking != 'if' else ''} do {who} {{x}} {{y}}?",
                f"{_TELL} {words} {who} {{x}} {{y}}?",
            )
    for auxiliary in _AUXILIARIES:
        frames[f"who_{auxiliary}"] = (
            f"who {auxiliary} {{x}} {{y}}?",
            f"{_TELL} who {auxiliary} {{x}} {{y}}?",
        )
        frames[f"what_{auxiliary}"] = (
            f"what {auxiliary} {{x}} {{y}}?",
            f"{_TELL} what {{x}} {auxiliary} {{y}}?",
        )
    for how in ("how much", "how many", "how often", "how far", "how long"):
        frames[f"{how}_must"] = (
            f"{how} {{x}} (do I have to|must I|do I need to) {{y}}?",
            f"{_TELL} {how} {{x}} I (have to|must|need to) {{y}}?",
        )
        frames[f"{how}_can"] = (f"{how} {{x}} can I {{y}}?", f"{_TELL} {how} {{x}} I can {{y}}?")
        frames[f"{how}_is"] = (f"{how} {{x}} (is|are) {{y}}?", f"{_TELL} {how} {{x}} {{y}} (is|are)?")
    return frames


# Where a frame has a richer entry above, that one stands for it.
_SAID = frozenset(
    ("how_can_I", "how_should_I", "if_can_I", "if_must_I", "if_should_I", "why_is_it", "if_is_it", "how_do_I",
     "when_does_it")
)  # fmt: skip
QUESTIONS.update({name: forms for name, forms in _frames().items() if name not in _SAID})

# Said before or behind a question without changing it.
BEFORE = (
    "",
    "",
    "",
    "",
    "hi, ",
    "hello, ",
    "hey, ",
    "excuse me, ",
    "please, ",
    "a question: ",
    "good morning! ",
    "sorry, ",
)
BEHIND = ("", "", "", "", "", " please", " thanks", " thank you")
