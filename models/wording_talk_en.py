"""English small talk, and questions the shop assistant declines."""

from __future__ import annotations

TOPICS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "start": (
        (
            "I am new to manga. Where (should|do) I start?",
            "what is a good (first manga|manga for beginners|series to start with)?",
            "I have never read manga. What do you (recommend|suggest)?",
            "can you (recommend|suggest) (something|a manga) for (a beginner|beginners)?",
            "(can you recommend|recommend|suggest) a (good |)manga",
            "what should I read?",
            "what are your (bestsellers|most popular series|popular series)?",
        ),
        (
            (
                "Fullmetal Alchemist is a good start: it has 27 volumes, and the story is complete. What"
                " genres do you like?"
            ),
            "Popular choices are Fullmetal Alchemist, Death Note and Spy x Family. Which genre do you like?",
            "For a short start try Death Note with 12 volumes. For an adventure try Fullmetal Alchemist.",
        ),
    ),
    "greet": (
        (
            "(hi|hello|hey|hello there|hi there|good morning|good evening|good afternoon)(!|.|)",
            "hey, (anyone there|are you there)?",
            "hi, (can you help me|I have a question|I need some help)(.|?)",
            "how are you(?| today?)",
        ),
        (
            (
                "Hello! How can I help you (today|)? I can recommend manga, check stock or answer questions"
                " about orders."
            ),
            "Hi(, welcome to our manga shop|)! (What are you looking for|How can I help you)(?| today?)",
            "Welcome! (Are you looking for a certain manga|Can I help you find a manga)?",
        ),
    ),
    "who": (
        (
            "who are you?",
            "what can you (do|help me with)?",
            "are you a (bot|robot|human|real person)?",
            "what is this(?| chat?)",
        ),
        (
            (
                "I am the assistant of this manga shop. I can recommend series and answer questions about"
                " stock, shipping and returns."
            ),
            "I am a manga shop assistant. Ask me about series, prices, delivery or returns.",
        ),
    ),
    "thanks": (
        (
            (
                "(thanks|thank you|thank you very much|many thanks|thanks a lot|great, thanks|perfect, thank"
                " you)(!|.|)"
            ),
            "(cool|great|perfect|nice|awesome)(, that helps|!|, thanks for the help)",
            "that (helps|helped) a lot(!|)",
        ),
        (
            "You are welcome! (Is there anything else I can help with?|Enjoy your manga!|Happy reading!)",
            "My pleasure! (Let me know if you need anything else.|Happy reading!)",
            "Glad to help! (Enjoy your reading!|Anything else?)",
        ),
    ),
    "bye": (
        (
            "(bye|goodbye|see you|bye bye|have a nice day|see you later|good night)(!|.|)",
            "that is all(, bye|, thanks|.)",
        ),
        (
            "Goodbye, and happy reading!",
            "Thank you for your visit. (See you soon!|Have a nice day!)",
            "Have a nice day, and enjoy your manga!",
        ),
    ),
    "off_topic": (
        (
            "what is the weather (like|) (today|tomorrow|in {city})?",
            "(can you|please|could you) (write|fix|debug) (some|my|a) (code|Python script|program) (for me|)",
            "who (will win|won) the (election|world cup|football match)?",
            "(what is|calculate|solve) {n} (plus|times|minus) {m}?",
            "(can you|please) (give|tell) me a recipe for (pasta|pizza|soup|ramen|cake)",
            "what medicine (should I take|helps) (for|against) (a headache|a cold|fever)?",
            "(which|what) stocks should I buy?",
            "(book|find) me a (flight|hotel|train) to {city}",
            "(translate|write) (an essay|a letter|my homework) for me",
            "what is the capital of {country}?",
            "(do you like|who is) the president?",
            "(tell me a joke|sing me a song|play some music)",
            "how do I (repair my car|fix my phone|lose weight|cook rice)?",
        ),
        (
            "Sorry, I can only help with manga and our shop. (Would you like a recommendation?|)",
            "I am afraid I can't help with that. I can answer questions about manga, orders and delivery.",
            (
                "That is outside what I can do here, sorry. (Is there a manga I can look up for you?|Can I"
                " help you with a manga?)"
            ),
        ),
    ),
}
CITIES = ("Berlin", "Paris", "Tokyo", "London", "Rome", "Madrid", "Vienna", "New York", "Hamburg", "Lisbon")
