"""A chat template of unknown cost is rendered within bounds; one known to be cheap is rendered in place."""

import shutil
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import pytest

from budgeting.counting import ChatTokenizer
from budgeting.errors import TemplateRefused
from budgeting.plan import INLINE_CHARS
from budgeting.template import ChatTemplate
from budgeting.values import Message, Role
from gateway.limited.process import LimitedProcess, Limits
from gateway.prompts.bounded_work import RENDER, render_in

pytestmark = pytest.mark.slow

DEMO = Path("models/demo")
ASKED = [Message(Role.USER, "attack")]
PLAIN = "{% for m in messages %}<|im_start|>{{ m.role }}\\n{{ m.content }}<|im_end|>\\n{% endfor %}"
ATTACK = "{% if messages[0].content == 'attack' %}BODY{% endif %}" + PLAIN


def tokenizer_with(folder: Path, template: str, limits: Limits) -> Iterator[ChatTokenizer]:
    shutil.copytree(DEMO, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.safetensors"))
    (folder / "chat_template.jinja").write_text(template)
    process = LimitedProcess(RENDER, str(folder), limits=limits)
    yield ChatTokenizer(folder, elsewhere=render_in(process, folder))
    process.close()


@pytest.mark.parametrize(
    ("body", "bound"),
    [
        ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "processor time"),
        ("{% set x = 'a' * 2000000000 %}{{ x|length }}", "memory"),
        (
            "{% set ns = namespace(x='aaaa') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
            "memory",
        ),
        ("{% for a in range(20) %}{{ 'a' * 1000000 }}{% endfor %}", "text"),
        ("{% macro m(n) %}{{ m(n) }}{{ m(n) }}{% endmacro %}{{ m(1) }}", "RecursionError"),
        ("{{ range(1000000)|list|length }}", "OverflowError"),
    ],
)
def test_a_hostile_template_is_refused_by_its_name_and_its_bound(
    tmp_path: Path, body: str, bound: str
) -> None:
    for tokenizer in tokenizer_with(tmp_path / "evil", ATTACK.replace("BODY", body), Limits(wall_s=120.0)):
        assert tokenizer.unseen_chars(ASKED) > INLINE_CHARS * tokenizer.speed  # never on the event loop
        with pytest.raises(TemplateRefused, match=bound) as refused:
            tokenizer.encode_chat(ASKED)
        assert "evil" in str(refused.value) or bound in ("RecursionError", "OverflowError")
        assert tokenizer.encode_chat([Message(Role.USER, "hello")])


def test_a_cheap_template_is_rendered_in_place_and_to_the_same_ids(tmp_path: Path) -> None:
    def refuse(job: bytes) -> bytes:
        raise AssertionError("rendered elsewhere")

    in_place = ChatTokenizer(DEMO, elsewhere=refuse)
    source = (DEMO / "chat_template.jinja").read_text()
    for elsewhere in tokenizer_with(
        tmp_path / "same", source + "{% if 1 * 1 == 2 %}{% endif %}", Limits(wall_s=120.0)
    ):
        assert elsewhere.unseen_chars(ASKED) > INLINE_CHARS * elsewhere.speed > in_place.unseen_chars(ASKED)
        assert elsewhere.encode_chat(ASKED) == in_place.encode_chat(ASKED)


@pytest.mark.parametrize(
    "body",
    [
        "{% set a = 'x' %}{% set a = a ~ a %}{{ a }}",
        "{% set a = m.content %}{% set a = a|tojson %}{{ a }}",
        "{% for n in messages %}{{ n.content }}{% endfor %}",
        "{{ m.content.replace('a', m.content) }}",
        "{{ m.content|join(m.content) }}",
        "{{ '%1000000000d' % 1 }}",
        "{{ m.content|center(1000000000) }}",
        "{{ m.content|tojson|tojson }}",
        "{{ m.content|join('a')|join('b') }}",
        "{{ m.content|join('a separator of more than 16 letters') }}",
        "{{ m.content|join(attribute='x') }}",
        "{% set a = m.content %}{% set a = a|join('a') %}{{ a }}",
        "{{ m.content % 2 }}",
        "{{ loop.index0 % m.content }}",
        "{% set all = messages %}{% for n in all %}{{ n.content }}{% endfor %}",
        "{% set x = m.calls %}{% for n in x %}{% for o in x %}{{ o }}{% endfor %}{% endfor %}",
    ],
)
def test_what_may_grow_without_bound_is_not_taken_for_cheap(body: str) -> None:
    from jinja2 import Environment

    from budgeting.template_analysis import is_cheap

    assert is_cheap(Environment().parse(PLAIN))
    assert not is_cheap(Environment().parse("{% for m in messages %}" + body + "{% endfor %}"))


@pytest.mark.parametrize(
    "body",
    [
        "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles') }}{% endif %}",
        "{{ m.calls|reject('equalto', 'x')|join(', ') }}",
        "{% set call = m.calls[0] %}{% set given = call.function %}"
        "{% for name, value in given.arguments|items %}{{ name + value }}{% endfor %}",
    ],
)
def test_what_the_templates_of_common_models_do_is_known_to_be_cheap(body: str) -> None:
    from jinja2 import Environment

    from budgeting.template_analysis import is_cheap

    assert is_cheap(Environment().parse("{% for m in messages %}" + body + "{% endfor %}"))


def test_a_variable_that_another_part_of_a_template_sets_too_is_not_taken_for_part_of_a_message() -> None:
    from jinja2 import Environment

    from budgeting.template_analysis import is_cheap

    body = (
        "{% for m in messages %}{% if m.x %}{% set c = m.x %}{% endif %}{% for n in c %}{{ n }}{% endfor %}"
    )
    assert is_cheap(Environment().parse(body + "{% endfor %}"))
    assert not is_cheap(Environment().parse("{% set c = messages %}" + body + "{% endfor %}"))


@pytest.mark.parametrize("value", ["'a'|center(10 ** 12)", "'a' * 10 ** 12", "'%1000000000000d' % 1"])
def test_a_template_is_compiled_without_computing_its_values(value: str) -> None:
    source = "{% for m in messages %}{{ m.content }}{% endfor %}{% if messages[9] %}{{ VALUE }}{% endif %}"
    template = ChatTemplate(source.replace("VALUE", value), {}, now=datetime.now)
    assert template.render(ASKED, add_generation_prompt=False) == "attack"
