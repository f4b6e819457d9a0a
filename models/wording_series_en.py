"""English questions and answers about one series; ``{t}`` is the title and may be a pronoun in questions."""

from __future__ import annotations

QUESTIONS: dict[str, tuple[str, ...]] = {
    "author": (
        "(which|what) person (created|drew|wrote) {t}?",
        "(please name|name) the (author|mangaka|writer) of {t}.",
        "who invented {t}?",
        "(whose|which artist's) idea was {t}?",
        "who (wrote|created|drew|made|is behind) {t}?",
        "who is the (author|mangaka|writer|artist|creator) (of|behind) {t}?",
        "(which|what) (mangaka|author|artist|writer) (wrote|created|is behind|made) {t}?",
        "(do you know|can you tell me|could you tell me|tell me|I want to know) who (wrote|created|drew) {t}",
        "(whose work is|who do we thank for) {t}?",
        "{t} (author|mangaka)?",
        "(what is|what's) the name of the (author|mangaka) of {t}?",
        "(was|is) {t} (written|drawn) by someone (famous|I know)?",
        "I am looking for the (author|artist) of {t}.",
    ),
    "volumes": (
        "(count|tell me|give me) the volumes of {t}.",
        "{t} has how many (volumes|books)?",
        "(what number|which number) of (volumes|books) does {t} have?",
        "how many (volumes|books) (in total|overall) for {t}?",
        "how many (parts|tomes) does {t} consist of?",
        "where does {t} end, at which volume?",
        "how many (volumes|books|tankobon) (are there of|are there in|are in) {t}?",
        "how many (volumes|books) does {t} (have|run for|span)?",
        "how long is {t}?",
        "(what is|what's) the (number of volumes|volume count|length) of {t}?",
        "how many volumes do I need (to buy|to collect|) for (all|the whole) of {t}?",
        "{t} (volume count|number of volumes)?",
        "(can you tell me|do you know|tell me) how many volumes {t} has",
        "I want to collect {t}. How many (volumes|books) is that?",
        "is {t} a long series?",
    ),
    "status": (
        "is the story of {t} (over|finished|told to the end)?",
        "(did|does) {t} (end|stop) (already|)?",
        "will there be more (volumes|books) of {t}?",
        "is {t} still being (written|drawn|made)?",
        "can I read {t} to the end?",
        "(do I have to wait for|are there) more (volumes|books) of {t}?",
        "is {t} (finished|complete|completed|over|done) (yet|already|)?",
        "is {t} (still running|ongoing|still going|still being published)?",
        "has {t} (ended|finished|been completed)?",
        "(what is|what's) the (publication |)status of {t}?",
        "does {t} have an ending (yet|)?",
        "do new volumes of {t} still come out?",
        "(can you tell me|do you know) (if|whether) {t} is (finished|complete|over)?",
        "{t} status?",
    ),
    "publisher": (
        "(which|what) (house|firm) (prints|brings out) {t}?",
        "who (prints|brings out|sells the licence of) {t}?",
        "who (publishes|is the publisher of|releases|puts out) {t} (in English|)?",
        "(which|what) (publisher|company) (publishes|releases|puts out) {t}?",
        "(what is|what's) the publisher of {t}?",
        "{t} publisher?",
        "(do you know|can you tell me) who publishes {t}?",
    ),
    "price": (
        "how many EUR (is|for) {t}?",
        "how much money (is|for) (one|a|a single) (volume|book) of {t}?",
        "what do I (pay|have to pay) for (one|a) (volume|book) of {t}?",
        "what is (one|a|a single) (book|volume) of {t} worth?",
        "(give|tell) me the (cost|price) of {t}.",
        "is {t} (cheap|affordable)?",
        "{t} in euros?",
        "how much (is|does) {t} (cost|)?",
        "how much is (one|a) volume of {t}?",
        "(what is|what's) the price of {t}?",
        "what does (a volume of|one book of|) {t} cost?",
        "(can you tell me|do you know) the price (for|of) (a volume of|) {t}?",
        "{t} price?",
        "is {t} expensive?",
        "what would I pay for (a volume of|) {t}?",
    ),
    "stock": (
        "(can|could) I (still|) (have|get|buy) (a copy of|) {t} (now|here|)?",
        "(have you got|you got) {t}?",
        "is {t} (sold out|gone|on the shelf)?",
        "is there (any|a copy of) {t} (here|in the shop|in your warehouse)?",
        "are (any|some) (volumes|books) of {t} (here|available|left)?",
        "may I order {t}?",
        "I'd like (a copy of|to have) {t}, is (that|it) possible?",
        "do you have {t} (in stock|available|right now|)?",
        "is {t} (available|in stock) (right now|at the moment|today|)?",
        "can I (buy|order|get) {t} (right now|from you|today|)?",
        "(what is|what's) the availability of {t}?",
        "do you (sell|carry|stock) {t}?",
        "{t} in stock?",
        "are there (any|) copies of {t} (left|available)?",
        "I want to buy {t}. Is it (available|in stock)?",
    ),
    "about": (
        "what is the (plot|story|content) of {t}?",
        "(explain|sum up|outline) (the plot of|the story of|) {t} (for me|).",
        "why do people read {t}?",
        "(I don't know|never heard of) {t}. What is it?",
        "what is {t} about?",
        "tell me (something|more|a bit|) about {t}.",
        "(can|could) you (describe|summarise|introduce) {t} (for me|)?",
        "what (kind of story is|happens in|is the story of) {t}?",
        "(I have heard of|my friend keeps talking about) {t}. What is it?",
        "give me a (short|quick) (summary|overview) of {t}.",
        "is {t} worth reading?",
        "I know nothing about {t}, (help me out|please explain).",
    ),
    "genre": (
        "(tell|name) me the genre of {t}.",
        "under which genre (is|do you list) {t}?",
        "{t} is what (kind|genre|type)?",
        "is {t} (action|romance|horror|comedy|historical|fantasy) or (drama|sports|sci-fi|something else)?",
        "what genre is {t}?",
        "(which|what) genre does {t} belong to?",
        "what (kind|type|sort) of manga is {t}?",
        "{t} genre?",
        "how would you classify {t}?",
    ),
    "like": (
        "(after|next to) {t}, what (would be good|do you have|comes close)?",
        "{t} is my favourite. What (else|next)?",
        "which (manga|series|title) (resembles|is close to|comes near) {t}?",
        "(anything|something) for (fans|a fan|readers) of {t}?",
        "I (read|finished) all of {t} and want more like it.",
        "got anything (in the style|in the spirit) of {t}?",
        "(can you|could you|please) (recommend|suggest) (something|a manga|a series) (like|similar to) {t}?",
        "I (loved|liked|enjoyed|finished|just finished|really liked) {t}. What should I read next?",
        (
            "(I want|I am looking for|I need|show me|do you have) (something|manga|a series) (like|similar"
            " to) {t}."
        ),
        "what (is|would be) (similar to|like) {t}?",
        (
            "what (manga|series|) (would you recommend|do you recommend|can you recommend) (if I liked|after)"
            " {t}?"
        ),
        "(something|anything) (like|similar to) {t}?",
        "my (son|daughter|friend|sister|brother) (loves|likes) {t}. Any (ideas|suggestions|recommendations)?",
        "if I (enjoyed|like|love) {t}, what else (might|would|could) I (like|enjoy)?",
    ),
    "author_volumes": (
        "who (wrote|created) {t} and how many volumes (are there|does it have)?",
        "(tell me|I need) the author and the number of volumes of {t}.",
    ),
    "price_stock": (
        "(is {t} in stock|do you have {t}) and (how much is it|what does it cost)?",
        "(tell me|I need) the price and availability of {t}.",
    ),
}

ANSWERS: dict[str, tuple[str, ...]] = {
    "author": (
        "{t} (was created|was written|is) by {author}.",
        "{author} is the (author|mangaka) (of|behind) {t}.",
        "{t} is (a|the) work of {author}. It is (a {genre}|{genre}) series.",
        "The author of {t} is {author}.",
        (
            "{t} is by {author}. (Would you like to see other series by the same author?|Shall I check a"
            " volume for you?)"
        ),
    ),
    "publisher": (
        "{t} is published by {publisher} (in English|).",
        "The English edition of {t} comes from {publisher}.",
        "{publisher} publishes {t}.",
    ),
    "price": (
        "(One|A|Each) volume of {t} costs {price} EUR.",
        "{t} is {price} EUR (per|a) volume.",
        "You pay {price} EUR for (a|one) volume of {t}. (All {volumes} volumes have the same price.|)",
        "The price of {t} is {price} EUR per volume.",
    ),
    "about": (
        "{t} is a {genre} series by {author}: {blurb}. {length}",
        "{t} by {author} is a {genre} manga. (In short|The idea): {blurb}. {length}",
        "In {t}, {blurb}. It is a {genre} series by {author}.",
    ),
    "genre": (
        "{t} is a {genre} manga (by {author}|).",
        "{t} is {genre}.",
        "{t} belongs to the {genre} genre.",
    ),
    "author_volumes": (
        "{t} is by {author} and has {volumes} volumes.",
        "{author} wrote {t}. It has {volumes} volumes.",
    ),
    "price_stock": ("{stock_line} (One|A) volume costs {price} EUR.",),
}

LENGTH: dict[str, tuple[str, ...]] = {
    "complete": (
        "{t} has {volumes} volumes (in total|and is complete).",
        "There are {volumes} volumes of {t}(, and the story is complete|).",
        "{t} runs for {volumes} volumes.",
        "The whole series has {volumes} volumes.",
    ),
    "ongoing": (
        "{t} has {volumes} volumes so far and is still running.",
        "There are {volumes} volumes of {t} so far. The series is ongoing.",
        "So far there are {volumes} volumes of {t}.",
    ),
    "on hiatus": (
        "{t} has {volumes} volumes so far, but it is on hiatus.",
        "There are {volumes} volumes of {t}. The series is on hiatus at the moment.",
    ),
}

STATUS: dict[str, tuple[str, ...]] = {
    "complete": (
        "{t} is complete. The story ends with volume {volumes}.",
        "{t} is finished, with {volumes} volumes (in total|).",
        "The series is complete with {volumes} volumes.",
    ),
    "ongoing": (
        "{t} is ongoing. There are {volumes} volumes so far.",
        "{t} is still running, and new volumes come out (regularly|from time to time).",
        "The series is ongoing, with {volumes} volumes so far.",
    ),
    "on hiatus": (
        "{t} is on hiatus after {volumes} volumes.",
        "{t} is not finished, and the series is on hiatus at the moment.",
    ),
}

STOCK: dict[str, tuple[str, ...]] = {
    "in": (
        "{t} is in stock (right now|and ready to ship|).",
        (
            "Yes, {t} is in stock. (Would you like to order it?|We can ship it today.|It costs {price} EUR"
            " per volume.)"
        ),
        "Yes, we have {t} in stock.",
    ),
    "low": (
        "Yes, but only a few copies of {t} are left in stock.",
        "{t} is low in stock: only a few copies are left. (I would order soon.|)",
    ),
    "out": (
        "{t} is out of stock at the moment. (We can send you an e-mail when it is back.|)",
        (
            "Sorry, {t} is out of stock right now. (Would you like something similar?|New copies usually"
            " arrive in two weeks.)"
        ),
    ),
    "pre": (
        "{t} is available for preorder. (We ship it on release day.|You pay only when it ships.|)",
        "You can preorder {t} now. (It is not in stock yet.|)",
    ),
}

LIKE: tuple[str, ...] = (
    "If you liked {t}, (try|you could try|I suggest|have a look at) {a} by {a_author} or {b} by {b_author}.",
    (
        "(Fans|Readers) of {t} often enjoy {a} by {a_author}(. {b} is another good choice| and {b} by"
        " {b_author})."
    ),
    (
        "After {t} I (recommend|suggest) {a}: {a_blurb}. {b} by {b_author} is (a good choice too|also close"
        " in mood)."
    ),
    "{a} by {a_author} is close to {t}. It is a {a_genre} series with {a_volumes} volumes.",
)
LIKE_FROM_EVIDENCE: tuple[str, ...] = (
    (
        "From our catalogue I (suggest|recommend) {a} by {a_author}, a {a_genre} series with {a_volumes}"
        " volumes."
    ),
    (
        "{a} by {a_author} (could be a good match|is a good match|is the closest). It is {a_genre} and costs"
        " {a_price} EUR."
    ),
)
BY_GENRE_QUESTIONS: tuple[str, ...] = (
    "(give|name) me (a|one|some) {genre} (manga|title|series).",
    "(is there|have you got) (a|any|some) {genre} (manga|title|story)?",
    "I (need|search) (a|some) {genre} (manga|story|to read).",
    "(the best|a good|your best) {genre} (manga|series), please.",
    "(can you|could you|please) (recommend|suggest) a (good|) {genre} manga?",
    "(I am looking for|I want|I'd like|show me|do you have) (some|a good|any|a) {genre} (manga|series).",
    "(what|which) {genre} (manga|series) (do you have|would you recommend|can you recommend|is good)?",
    "I (am in the mood for|like|love|enjoy) {genre}. What (do you suggest|should I read)?",
    "any good {genre} (manga|series)?",
    "(my friend|my son|my sister) likes {genre} manga. What would be a good (gift|present)?",
)
BY_GENRE_ANSWERS: tuple[str, ...] = (
    "For {genre} I (recommend|suggest) {a} by {a_author}: {a_blurb}.",
    "(Try|Have a look at) {a} by {a_author}. It is a {genre} series with {a_volumes} volumes.",
    "In {genre} we have {a} by {a_author}, with {a_volumes} volumes at {a_price} EUR each.",
)
BY_AUTHOR_QUESTIONS: tuple[str, ...] = (
    "(other|more) (manga|series|books) by {author}?",
    "what else (is there|do you have) (by|from) {author}?",
    "(list|name) the (series|manga|works) of {author}.",
    "(what|which manga|which series) do you have by {author}?",
    "(what|which series) (did|has) {author} (write|written|created)?",
    "(do you have|show me|I am looking for) (anything|manga|books|something) by {author}.",
    "I like {author}. What (can I buy|do you have)?",
)
BY_AUTHOR_ANSWERS: tuple[str, ...] = (
    "By {author} we have {titles}.",
    "{author} created {titles}. (Would you like to know more?|)",
    "From {author} you can find {titles} in our shop.",
)
UNKNOWN_ANSWERS: tuple[str, ...] = (
    (
        "Sorry, I (can't|could not) find {t} in our catalogue. (Could you check the title?|Is there another"
        " series I can look up?|)"
    ),
    (
        "{t} is not in our catalogue. (I can suggest something similar if you tell me the genre.|Can I look"
        " up another title?)"
    ),
    "I don't see {t} in our catalogue, so I can't say more about it. (Do you have another title in mind?|)",
)
NOT_LISTED_ANSWERS: tuple[str, ...] = (
    "The catalogue entry for {t} does not list the {field}.",
    "I don't see the {field} of {t} in the catalogue entry. (Our team can check it for you.|)",
)

# Sentences that may follow an answer, by the fact that they add; "offer" adds none and only asks.
EXTRAS: dict[str, tuple[str, ...]] = {
    "author": ("It is by {author}.", "The author is {author}."),
    "volumes": ("It has {volumes} volumes.", "There are {volumes} volumes."),
    "price": (
        "A volume costs {price} EUR.",
        "It costs {price} EUR per volume.",
        "The price is {price} EUR per volume.",
    ),
    "genre": ("It is a {genre} series.", "The genre is {genre}."),
    "offer": (
        "Shall I look up (another|a similar) series for you?",
        "Would you like (to know more|to order it|a similar recommendation)?",
        "Let me know if you (want to order it|need anything else|would like a similar series).",
        "(I can also check another title for you.|Just ask if you want to know more.)",
    ),
}
