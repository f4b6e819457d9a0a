"""Makes text with a given number of tokens from a seed: the words of a manga shop in random order."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

from ops.replay.shape import Planned

# Single words with their punctuation, so that each has the same token count everywhere.
_SHOP_TALK = """
manga volume series chapter author artist publisher edition shelf catalog order cart basket parcel shipping
delivery return refund stock warehouse customer shop price discount gift wishlist preorder release reprint
hardcover paperback omnibus boxset translation English Japanese samurai pirate ninja hunter wizard detective
vampire robot mecha school tournament kitchen ocean desert island village castle dragon sword spirit demon
hero rival friend brother sister captain teacher student king queen romance comedy drama horror mystery
adventure sports history fantasy mature gentle dark slow quick short long new old first last next best rare
signed used sealed damaged missing late early today tomorrow weekly monthly please recommend compare find
send keep read like want need arrive explain describe what which where when how why and with about from
after before story, ending. reader, cover. page, panel. colour, stories. number? copies, address. question?
"""
WORDS = tuple(_SHOP_TALK.split())
GUESSED_COST = 1  # tokens of a word when the gateway has no /tokenize; English words of this kind have 1 to 2


@dataclass(frozen=True, slots=True)
class Lexicon:
    """Words with the number of tokens that each adds to a text.

    ``overhead``: tokens of a prompt besides its text: system prompt, markup. ``calibrated``: whether the
    gateway's tokenizer counted the words.
    """

    costs: tuple[tuple[str, int], ...]
    overhead: int = 0
    calibrated: bool = False


UNCALIBRATED = Lexicon(tuple((word, GUESSED_COST) for word in WORDS))


class TextMaker:
    """Makes the prompts of a replay; the same ``seed`` gives the same texts."""

    def __init__(self, lexicon: Lexicon, seed: int) -> None:
        self._lexicon = lexicon
        self._seed = seed
        self._longest = max(cost for _, cost in lexicon.costs)

    def prompt(self, planned: Planned) -> str:
        """A user turn with which the whole prompt has ``planned.prompt_tokens`` tokens, or a few less.

        Requests with the same leading ``block_ids`` begin with the same text.
        """
        wanted = max(1, planned.prompt_tokens - self._lexicon.overhead)
        parts = []
        for block in planned.block_ids:
            if wanted <= 0:
                break
            parts.append(self.words(f"block:{block}", min(planned.block_tokens, wanted)))
            wanted -= planned.block_tokens
        if wanted > 0:  # the ids of the trace do not cover the whole prompt
            parts.append(self.words(f"request:{planned.index}", wanted))
        return " ".join(parts)

    def words(self, name: str, tokens: int) -> str:
        """Text of ``tokens`` tokens or a few less, at least one word; texts of one name share their start."""
        rng = random.Random(f"{self._seed}/{name}")
        chosen: list[str] = []
        left = tokens
        pool: Sequence[tuple[str, int]] = self._lexicon.costs
        while left >= self._longest:
            # This many words fit in any case; drawing them together is several times faster than one by one.
            drawn = rng.choices(pool, k=left // self._longest)
            chosen.extend(word for word, _ in drawn)
            left -= sum(cost for _, cost in drawn)
        while fitting := [entry for entry in pool if entry[1] <= left]:
            word, cost = rng.choice(fitting)
            chosen.append(word)
            left -= cost
        return " ".join(chosen) or pool[0][0]
