"""The patterns of volatile content, and of the words before it that determine its meaning.

Every repetition is bounded, or cannot restart inside itself, so matching is linear in the text's length.
:mod:`gateway.prompts.volatile` decides by the group that matched and the words in front of it.
"""

import re
from typing import Final

_MONTH = (
    r"(?:jan(?:uary)?|feb(?:ruary)?|mar(?:ch)?|apr(?:il)?|may|june?|july?|aug(?:ust)?|sept?(?:ember)?"
    r"|oct(?:ober)?|nov(?:ember)?|dec(?:ember)?)\b\.?"
)
_WEEKDAY = (
    r"(?:mon(?:day)?|tue(?:s(?:day)?)?|wed(?:nesday)?|thu(?:r(?:s(?:day)?)?)?|fri(?:day)?|sat(?:urday)?"
    r"|sun(?:day)?)\b"
)
_DAY = r"(?:0?[1-9]|[12]\d|3[01])"
_YEAR = r"(?:19|20)\d\d"
_CLOCK = r"(?:[01]?\d|2[0-3]):[0-5]\d"
_SECONDS = r":[0-5]\d(?:[.,]\d{1,9})?"
_ZONE = r"(?:\ ?(?:Z|UTC|GMT|[A-Z]{2,4}T|[+-]\d\d:?\d\d)\b)"
_ISO = rf"{_YEAR}-(?:0[1-9]|1[0-2])-(?:0[1-9]|[12]\d|3[01])"
_NOUN = r"(?:turn|message|request|query|question|attempt|interaction|exchange|visit|call)"
_OWNER = (
    r"(?:request|req|session|sess|trace|span|correlation|corr|conversation|conv|chat|thread|message|msg|run"
    r"|user|customer|visitor|client|transaction|txn|event|order|invocation)"
)

# The alternatives are tried in order at each position. The pattern checks only one character before a match;
# whether a match is volatile may depend on the words before it, see `_means_now`.
PATTERN: Final = re.compile(
    rf"""(?<![\w.])(?:
      (?P<uuid> [0-9a-f]{{8}}-[0-9a-f]{{4}}-[0-9a-f]{{4}}-[0-9a-f]{{4}}-[0-9a-f]{{12}} )(?!\w)
    | (?P<stamp> {_ISO}[T\ _]\ ?{_CLOCK}(?:{_SECONDS})?{_ZONE}?
        | (?:{_WEEKDAY},?\ )?{_DAY}\ {_MONTH}\ {_YEAR},?\ (?:at\ )?{_CLOCK}(?:{_SECONDS})?{_ZONE}?
        | (?:{_WEEKDAY},?\ )?{_MONTH}\ {_DAY},?\ {_YEAR},?\ (?:at\ )?{_CLOCK}(?:{_SECONDS})?{_ZONE}?
        | (?:{_WEEKDAY}\ )?{_MONTH}\ \ ?{_DAY}\ {_CLOCK}{_SECONDS}{_ZONE}?\ {_YEAR} )(?!\w)
    | (?P<date> {_ISO}
        | {_YEAR}/(?:0?[1-9]|1[0-2])/{_DAY}
        | {_DAY}[/.](?:0?[1-9]|1[0-2])[/.]{_YEAR}
        | (?:0?[1-9]|1[0-2])/{_DAY}/{_YEAR}
        | (?:{_WEEKDAY},?\ )?(?:the\ )?{_DAY}(?:st|nd|rd|th)?\ (?:of\ )?{_MONTH},?\ {_YEAR}
        | (?:{_WEEKDAY},?\ )?{_MONTH}\ {_DAY}(?:st|nd|rd|th)?,?\ {_YEAR} )(?![\w/]|[.-]\d)
    | (?P<cjk> {_YEAR}\ ?年\ ?(?:0?[1-9]|1[0-2])\ ?月\ ?{_DAY}\ ?日
        | {_YEAR}\ ?년\ ?(?:0?[1-9]|1[0-2])\ ?월\ ?{_DAY}\ ?일 )
    | (?P<day> (?:{_WEEKDAY},?\ )?{_DAY}(?:st|nd|rd|th)?\ (?:of\ )?{_MONTH}
        | (?:{_WEEKDAY},?\ )?{_MONTH}\ {_DAY}(?:st|nd|rd|th)?
        | {_WEEKDAY} )(?!\w)
    | (?P<time> {_CLOCK}{_SECONDS}{_ZONE}? )(?![\w:])
    | (?P<clock> \d{{1,2}}\ ?時(?:\ ?\d{{1,2}}\ ?分)?
        | {_CLOCK}(?:\ ?[ap]\.?m\b\.?)?{_ZONE}?
        | (?:0?[1-9]|1[0-2])\ ?[ap]\.?m\b )(?![\w:])
    | (?P<label> {_OWNER}(?:[\ _-]?(?:id|identifier|key|token|number|no\.?))
        (?:["']?\ ?[:=\#]\ ?["']?|\ (?:is\ )?["']?)
        (?=[\w-]{{0,63}}\d)[\w-]{{2,128}} )(?![\w-])
    | (?P<tagged> (?:{_OWNER}|cmpl|chatcmpl|resp|gen|usr|cus|evt|ord)[_-]
        (?=[0-9a-z]{{0,63}}\d)[0-9a-z]{{4,64}} )(?![\w-])
    | (?P<ulid> [0-7](?=[0-9A-Z]{{0,24}}[A-Z])[0-9A-HJKMNP-TV-Z]{{25}} )(?!\w)
    | (?P<hex> (?=[0-9a-f]{{0,63}}[a-f])(?=[0-9a-f]{{0,63}}\d)[0-9a-f]{{16,64}} )(?!\w)
    | (?P<unix> 1\d{{9}}(?:\.\d{{1,9}})?|1\d{{12}} )(?![\w.]\d|\w)
    | (?P<counter> {_NOUN}\ (?:no\.?\ ?|number\ |count(?:er)?\ ?[:=]?\ ?|\#\ ?)\d{{1,9}}
        | {_NOUN}\ \d{{1,9}}\ ?(?:of|/)\ ?\d{{1,9}}
        | {_NOUN}(?:_(?:count|number|index|no))?\ ?[:=]\ ?\d{{1,9}} )(?!\w)
    | (?P<turn> {_NOUN}\ \d{{1,9}} | \d{{1,9}}(?:st|nd|rd|th)\ {_NOUN} )(?!\w)
    )""",
    re.VERBOSE | re.IGNORECASE | re.ASCII,
)

CUE_CHARS: Final = 48  # how many characters before a match are searched for words that determine its meaning
# Prepended to those characters if the sentence begins earlier, so that `^` does not match there.
CUT: Final = "\0"

# Words directly before a date or a time that mark it as the current one.
NOW: Final = re.compile(
    r"(?:\b(?:today|now|tonight|as of|it is|it['’]s|at the moment)\b(?:['’]s (?:date|time|day))?[ \t]*"
    r"(?:is\b)?[\s:=,(\-–]{0,4}(?:the )?"
    r"|\b(?:current|present|local|server|system|request|actual)"
    r"(?:ly|[ _-](?:date|time|day|timestamp|local))\b"
    r"[^.!?。\n\d]{0,24}"
    r"|\b(?:today|now)(?:['’]s)? (?:date|time|day)[^.!?。\n\d]{0,16}"
    r"|^[\s\-*•>#<\[(\"']*(?:the )?(?:date|time|datetime|timestamp|day|clock)\b[^.!?。\n\d]{0,16}"
    r"|(?:今日|本日|現在|ただ今|今は|今の|오늘|현재|지금|今天|目前)[^。\n\d]{0,8})$",
    re.IGNORECASE,
)
# Words directly before a number of ten or thirteen digits that mark it as a time.
UNIX: Final = re.compile(
    r"(?:\b(?:unix|epoch|timestamp|time|now|clock|ts|date)\b|[_-](?:ts|at|time)\b)[^.!?。\n\d]{0,16}$",
    re.IGNORECASE,
)
# Words directly before a turn's number that mark it as the current turn.
CURRENT_TURN: Final = re.compile(
    r"\b(?:this is|it is|it['’]s|now|current(?:ly)?|you are (?:in|at|on))\b[ \t]*[:=]?[ \t]*(?:the |your )?$",
    re.IGNORECASE,
)
# Words that mark a date as fixed, as a part of the subject; those of the first group are directly before it.
FIXED: Final = re.compile(
    r"(?:\b(?:since|until|till?|through|to|and|before|after|from|by|between|or)\b[ \t]*(?:the )?"
    r"|\b(?:published|released?|launched|born|died|founded|established|opened|effective|valid|expires?"
    r"|deadline|edition|copyright|updated|revised|revision|version|approved|adopted|signed|written|cut-?off"
    r"|knowledge|e\.g\.?|examples?|such as|like|format|formatted|began|begins|started|starts|ended|ends"
    r"|holidays?|closed|isbn)\b[^.!?。\n]{0,24}"
    r"|(?:発売|刊行|創業|設立|以来|例|形式)[^。\n]{0,8})$",
    re.IGNORECASE,
)

# A line without a match has nothing volatile: without a digit, only a weekday can be volatile, as today's.
MAY_BE_VOLATILE: Final = re.compile(r"\d|\b(?:today|now|it['’]s|it is|day)\b", re.IGNORECASE)
FENCE: Final = re.compile(r"\s*(?:```|~~~)")

# The possible ends of a sentence inside a line, and the abbreviations that do not end one.
ENDS: Final = re.compile(
    r"(?<![.!?…])[.!?…]++[\"'”’)\]]{0,2}\s++(?=[\"'“‘(\[¿¡]{0,2}[^\W\d_a-z])"
    r"|(?<![。！？｡．।॥؟۔።])[。！？｡．।॥؟۔።]++[」』）]{0,2}\s*+(?![`~])"
)
ABBREVIATION: Final = re.compile(
    r"(?:^|[^\w])(?:mr|mrs|ms|dr|prof|st|jr|sr|no|nr|vol|ch|pp?|ed|eds|fig|approx|ca|cf|vs|etc|inc|ltd|co|corp|dept"
    r"|e\.g|i\.e|a\.m|p\.m|u\.s|jan|feb|mar|apr|jun|jul|aug|sept?|oct|nov|dec|mon|tues?|wed|thu|thurs|fri|sat|sun"
    r"|[a-z])\.$",
    re.IGNORECASE,
)
ABBREVIATION_CHARS: Final = 8  # how many characters before a full stop an abbreviation can begin

# A line that continues the previous one: it starts with a lower-case letter or a number, and is neither a
# list item nor a field.
CONTINUES_LINE: Final = re.compile(r"[a-z\d](?!\d{0,3}[.)]\s)(?![\w .-]{0,40}[:=])")
UNFINISHED: Final = "_,'’)"
