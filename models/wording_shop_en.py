"""English questions and answers about the shop: shipping, returns, payment, opening hours."""

from __future__ import annotations

from models import wording_talk_en as talk

# topic: (questions, answers)
TOPICS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "shipping": (
        (
            "how many days (will|does) my (order|parcel|package) (need|take)?",
            "(how long|how many days) do I wait for my (books|manga|parcel)?",
            "(shipping|delivery) (time|speed|duration)?",
            "what is the (usual|normal) (shipping|delivery) time?",
            "how long does (shipping|delivery) (usually|normally|) take?",
            "(what are|what is) your (delivery times|delivery time|shipping time|shipping times)?",
            "when will my (order|package|parcel|manga) arrive?",
            "how (fast|quickly) do you (ship|deliver)?",
            "how many days (does|until) (shipping|delivery) (take|)?",
            "(can you tell me|tell me) (something|more|) about (shipping|delivery)",
            "(I ordered today|if I order today), when does it (come|arrive)?",
        ),
        (
            "Delivery takes 1-2 business days in Germany and 3-5 business days in the EU.",
            (
                "We ship on the same day if you order before 14:00. Delivery takes 1-2 business days in"
                " Germany and 3-5 business days in the rest of the EU."
            ),
            (
                "Orders in Germany arrive in 1-2 business days, orders to other EU countries in 3-5 business"
                " days. (Which country should we ship to?|)"
            ),
        ),
    ),
    "shipping_cost": (
        (
            "(from|at) what (amount|total) is (shipping|delivery) free?",
            "(shipping|delivery|postage) (price|costs|fee)?",
            "when do I not pay for (shipping|delivery|postage)?",
            "how much extra is (postage|delivery)?",
            "how much (is|does) (shipping|delivery) (cost|)?",
            "(what are|tell me) (your|the) (shipping|delivery) (costs|fees|charges)?",
            "is (shipping|delivery) free?",
            "do (I|you) (get|have|offer) free (shipping|delivery)?",
            "what do (I|you) (pay|charge) for (shipping|delivery|postage)?",
        ),
        (
            "Shipping costs 2.90 EUR in Germany and 4.90 EUR in the EU. It is free for orders over 50 EUR.",
            (
                "Shipping is free for orders over 50 EUR. Below that it costs 2.90 EUR in Germany and 4.90"
                " EUR in the EU."
            ),
            (
                "In Germany shipping costs 2.90 EUR, in the rest of the EU 4.90 EUR. Orders over 50 EUR ship"
                " for free."
            ),
        ),
    ),
    "express": (
        (
            "can you (send|ship) it (faster|overnight|with express)?",
            "(is|what about) overnight (shipping|delivery) (possible|)?",
            "I need my (books|order|manga) (urgently|very soon|the next day).",
            "do you (have|offer) (express|next day|fast) (shipping|delivery)?",
            "can I get my (order|books|manga) (tomorrow|faster|by tomorrow)?",
            "I need it (tomorrow|quickly|fast). Is there an express option?",
            "how much is express (shipping|delivery)?",
        ),
        (
            (
                "Yes, express delivery costs 9.90 EUR and arrives on the next business day. Please order"
                " before 14:00."
            ),
            "With express delivery your order arrives on the next business day. It costs 9.90 EUR.",
        ),
    ),
    "returns": (
        (
            "I (don't like|don't need) (the book|my manga|this volume). Can (you take it back|I return it)?",
            "(how|where) do I send (it|a book|my order) back?",
            "(until when|how late) can I (return|send back) (a book|an order)?",
            "(returns|return policy|return deadline)?",
            "can you take back (a book|my order|two volumes)?",
            "(how do I|how can I|can I) (return|send back) (a manga|a book|an order|a volume|something)?",
            "(what is|what's|tell me) your return policy?",
            "(what is|what's) the (return window|return period|time limit for returns)?",
            "I (want|would like) to (return|send back) (my order|a volume|a book).",
            "how many days do I have (to return|for returning) (something|a book|an order)?",
            "can I return (a manga|a volume|a book) (I don't like|I have already|that I bought last week)?",
            "do you (accept|take) returns?",
        ),
        (
            "You can return books within 30 days if they are in good condition. The return label is free.",
            (
                "Returns are free within 30 days. Please print the return label from your account and send"
                " the books back."
            ),
            (
                "You have 30 days to return an order. The books should be in good condition, and the return"
                " label is free."
            ),
        ),
    ),
    "refund": (
        (
            "when (is|will) (the|my) money (be |)(back|paid back|returned)?",
            "how many days until (my|the) refund (arrives|is paid)?",
            "I sent (the book|it|my order) back. (When do I get the money|Where is the money)?",
            "(refund|money back) time?",
            "(when|how) do I get my (money back|refund)?",
            "how long does a refund take?",
            "(where is|when will I get) my refund?",
            "how (do|are) refunds (work|paid)?",
            "I want (a refund|my money back).",
            "do you (give|offer) refunds?",
        ),
        (
            (
                "Refunds take 5-7 business days after your return arrives. The money goes back to your"
                " payment method."
            ),
            "We refund the full price within 5-7 business days after we receive your return.",
            "As soon as your return arrives, the refund takes 5-7 business days.",
        ),
    ),
    "damaged": (
        (
            "my (volume|book|copy) has (a broken spine|missing pages|stains|a torn cover)",
            "the (book|manga|volume) (is|was) (wet|dirty|ripped|defective|faulty)",
            "(some|three|several) pages (are|were) (damaged|missing|blank|wrong)",
            "there is a (misprint|defect|hole|tear) in my (book|copy|volume)",
            "my (book|manga|volume|order|package) (arrived|came) (damaged|torn|broken|bent)",
            "(a page is|some pages are) (missing|torn) in my (book|volume).",
            "I (got|received) the wrong (book|volume|manga).",
            "the cover (is|was) (damaged|bent|torn). What can I do?",
            "one volume is missing from my (order|package).",
        ),
        (
            "I am sorry about that. Please send us a photo, and we will ship a replacement for free.",
            (
                "Sorry to hear that! We will send you a free replacement. Please e-mail a photo to"
                " help@hoshi.example."
            ),
        ),
    ),
    "exchange": (
        (
            "can you (change|exchange|swap) (it|this book|my volume) (for volume {n}|for another|)?",
            "I (want|would like|prefer) another (book|volume|title) instead",
            "is (an exchange|a swap) possible?",
            "can I (exchange|swap) (a|my) (book|volume|manga) (for another one|)?",
            "do you (do|offer) exchanges?",
            "I (bought|ordered) the wrong volume. Can I (exchange|swap) it?",
        ),
        (
            (
                "Yes, you can exchange a book within 30 days. Send it back with the free label and tell us"
                " what you want instead."
            ),
            "Exchanges are possible within 30 days. The return label is free.",
        ),
    ),
    "cancel": (
        (
            "I (don't want|no longer need) my order (anymore|), (please cancel it|can I cancel)?",
            "(cancellation|cancel), how?",
            "can you (stop|cancel|undo) (my|the) (order|purchase)?",
            "I ordered by mistake.",
            "(can I|how do I|how can I) cancel my order?",
            "I (want|need|would like) to cancel (my|an) order.",
            "is it possible to cancel an order?",
            "please cancel my order.",
        ),
        (
            (
                "You can cancel an order in your account until it ships. After that you can return it within"
                " 30 days."
            ),
            "An order can be cancelled until it ships. Open your account, choose the order and press cancel.",
        ),
    ),
    "address": (
        (
            "can I change (my|the) (delivery |shipping |)address?",
            "I (entered|gave|typed) the wrong address.",
            "(I moved|we moved), how do I change my address?",
        ),
        (
            "You can change the address in your account until the order ships.",
            (
                "Until the order ships you can change the address in your account. After that please write to"
                " help@hoshi.example."
            ),
        ),
    ),
    "payment": (
        (
            "(is|are) (Visa|a credit card|a bank transfer|cards) (ok|accepted|possible)?",
            "how (does payment work|is payment done)?",
            "(payment|pay) with (card|PayPal|bank transfer)?",
            "(how can I|how do I|what can I) pay (with|)?",
            "(which|what) payment (methods|options) do you (accept|have|offer)?",
            "can I pay (with|by) (PayPal|credit card|bank transfer|card)?",
            "do you (accept|take) (PayPal|credit cards|Visa|Mastercard)?",
        ),
        (
            "You can pay by credit card, PayPal or bank transfer.",
            "We accept credit cards, PayPal and bank transfer.",
        ),
    ),
    "contact": (
        (
            "(what is|where is) (your|the) (support|customer) (address|contact|mail)?",
            "I (want|need) to (write|speak|talk) to (support|your team|someone)",
            "whom can I (ask|write to|contact) (about a problem|)?",
            "(support|contact|e-mail|phone)?",
            "how can I (contact|reach) (you|the shop|support|customer service|a human)?",
            "(what is|what's|do you have) (your|an) e-mail (address|)?",
            "can I (talk|speak) to (a person|a human|someone|your team)?",
            "(is there|do you have) a (phone number|support e-mail|contact form)?",
        ),
        (
            "You can write to help@hoshi.example. Our team answers from Monday to Friday, 9:00 to 18:00.",
            (
                "Our team is there from Monday to Friday, 9:00 to 18:00. The e-mail address is"
                " help@hoshi.example."
            ),
        ),
    ),
    "hours": (
        (
            "how long is the (shop|store) open (on {day}|today|)?",
            "(opening hours|opening times) (on {day}|of the store|)?",
            "from when (are you|is the store) open (on {day}|)?",
            "can I (visit|come to) (your store|you) on {day}?",
            "(when|what time) (are you|is the shop|is your store|does the shop|do you) open?",
            "(what are|tell me) your (opening hours|hours|opening times)?",
            "are you open on (Sunday|Saturday|weekends|Monday|Friday)?",
            "when do you close (today|)?",
            "where is your (shop|store)?",
            "do you have a (shop|store) I can visit?",
        ),
        (
            "Our store in Berlin is open from Monday to Saturday, 10:00 to 19:00. It is closed on Sunday.",
            "The store is in Berlin. It is open Monday to Saturday from 10:00 to 19:00 and closed on Sunday.",
        ),
    ),
    "preorder": (
        (
            "can I (preorder|pre-order|reserve) (a volume|manga|new volumes|upcoming volumes)?",
            "how do preorders work?",
            "when do I pay for a preorder?",
        ),
        (
            "Yes, you can preorder new volumes. You pay when the book ships, on release day.",
            "Preorders ship on release day, and you pay only when the book ships.",
        ),
    ),
    "gift": (
        (
            "(is|do you have) gift wrapping (available|)?",
            "(can you|please) wrap (the book|it|my order) (for Christmas|in paper)",
            "I am buying a (present|gift). Do you (wrap|pack) (it|gifts)?",
            "(do you|can you|could you) (offer gift wrapping|wrap it as a gift|gift wrap my order)?",
            "do you (sell|have) gift cards?",
            "it is a (gift|present). Can you wrap it?",
            "how much is gift wrapping?",
        ),
        (
            "Gift wrapping costs 2.50 EUR per order. We also sell gift cards from 10 EUR.",
            "Yes, we wrap gifts for 2.50 EUR per order. Gift cards start at 10 EUR.",
        ),
    ),
    "discount": (
        (
            "do you have (a discount|any discounts|a coupon|a sale|any offers)?",
            "is there a (discount|student discount|promo code|sale)?",
            "can I get a discount (if I buy the whole series|on box sets|)?",
            "are box sets cheaper?",
        ),
        (
            "Box sets and complete series are 10 percent cheaper than single volumes.",
            "You get 10 percent off box sets and complete series.",
        ),
    ),
    "languages": (
        (
            "(are the books|are your manga|is it) in English?",
            "do you (sell|have) (Japanese|original|English|German) editions?",
            "(which|what) languages do you (sell|have)?",
        ),
        (
            "Our manga are English editions. Many series are also available in Japanese.",
            "We sell English editions, and many series in Japanese too.",
        ),
    ),
    **talk.TOPICS,
}

CLOSERS: tuple[str, ...] = (
    "(Can I help you with anything else?|Is there anything else you need?|Just ask if anything is unclear.)",
    "(Let me know if you have more questions.|I am happy to help with your order.)",
)
# Topics whose answers already end the exchange or ask something back.
NO_CLOSER: frozenset[str] = frozenset({"greet", "thanks", "bye", "off_topic", "start", "who"})
