"""English small talk, and questions the shop assistant declines."""

from __future__ import annotations

TOPICS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "start": (
        (
            "(which|what) manga (is|would be) good (for me|to begin with|for a start)?",
            "I (don't know|have no idea) what to read.",
            "(any|got any) (tips|suggestions|recommendations) (for me|)?",
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
            "(hiya|howdy|greetings|hi again|hello again|hey hey|yo|good afternoon everyone)(!|.|)",
            "(hi|hello|hey), (nice to meet you|how is it going|how are things|it is me again)(.|!|?)",
            "(I have|just) a question(.|)",
            "can (you|someone) help me?",
            "(nice|lovely) (morning|evening|afternoon) to you(!|.)",
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
            "(what|who) am I (talking|chatting|speaking) to?",
            "what (is your job|do you do here|are you for)?",
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
            "(thank you|thanks) (so much|for your help|for the info|for everything|, that was helpful)(!|.|)",
            "(I appreciate it|much appreciated|very kind of you|you are great|well done|good job)(!|.|)",
            "(super|wonderful|excellent|brilliant), (thanks|thank you|this helps)(!|.|)",
            "you (helped me a lot|were a great help|saved my day)(!|.|)",
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
            "(I have to go|I am leaving|talk to you later|so long|farewell)(!|.|)",
            "(bye|goodbye), (see you soon|have a good evening|until tomorrow|and thanks)(!|.|)",
            "(that was it|nothing else|I am done), (bye|goodbye|good night)(!|.|)",
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
            "(is it cold|how hot is it) (in {city} |)(today|tomorrow|on the weekend)?",
            (
                "(explain|what is) (quantum physics|photosynthesis|inflation|a black"
                " hole|gravity|democracy)(?| to me)"
            ),
            "(check|correct|do) (my maths|my essay|my taxes|my thesis|a presentation)",
            (
                "how can I (save money|earn money|learn the piano|train a dog|grow"
                " tomatoes|clean a carpet|sleep better)?"
            ),
            "should I (buy|sell) (bitcoin|gold|a house|a new car)?",
            "(recommend|suggest) (a restaurant|a hotel|a doctor|a laptop|a phone) (in {city}|)",
            "who (was|is) (Napoleon|Einstein|the king of {country}|the mayor of {city})?",
            "how (far|long) is it (from {city} to Berlin|to the moon|by car to {city})?",
            "(write|compose) (a poem|a song|an e-mail to my boss|a speech)",
            "what (time|day) is it (now|in {city}|)?",
            (
                "(my|the) (car|washing machine|computer|bike) (is broken|does not start|makes a noise). What"
                " (now|can I do)?"
            ),
            "(which|what) (football|basketball|tennis) team (is the best|won yesterday)?",
            "(translate|say) (good morning|this sentence|a word) (in|into) (Spanish|French|Chinese)",
            "(what|how many) (calories are in|vitamins has) (a banana|an apple|rice)?",
            "(I feel sick|my back hurts|I have a toothache|my leg hurts). What (helps|should I do)?",
            "what do you think (of|about) (politics|religion|the government|climate change)?",
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
