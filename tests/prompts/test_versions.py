from __future__ import annotations

from pathlib import Path

import pytest

from budgeting.values import SectionBudgets
from gateway.config.volatile import VolatilePolicy
from gateway.errors import UnknownPromptVersion
from gateway.prompts.canonical import stable_text
from gateway.prompts.versions import MAX_FILE_BYTES, PromptFileError, PromptVersion, PromptVersions

SHIPPED = Path(__file__).parents[2] / "prompts"


def load(tmp_path: Path, body: str, name: str = "v.yaml") -> PromptVersions:
    (tmp_path / name).write_text(body, encoding="utf-8")
    return PromptVersions.from_folder(tmp_path)


def test_the_shipped_version_is_unchanged() -> None:
    version = PromptVersions.from_folder(SHIPPED).get("chat-manga-2.1")
    assert stable_text(version) == (
        "You are a manga shopping assistant.\n\n"
        "Answer from the catalog and the evidence given. If you do not know, say so. "
        "Keep answers short and friendly.\n\n"
        "Follow catalog grounding rules."
    )
    assert version.budgets == SectionBudgets(400, 1400, 1200, 400)
    assert version.reserve is None
    # Published versions do not change; a new text is a new id.
    assert version.sha256 == "49d5c72eca8cbab33d83c8dad75cba6b8a3bf7da3d4038810841327060363265"


def test_everything_but_the_text_has_a_default(tmp_path: Path) -> None:
    version = load(tmp_path, "id: v\nsystem: Hi.\n").get("v")
    assert version == PromptVersion(id="v", system="Hi.", sha256=version.sha256)


def test_the_hash_is_of_the_meaning_not_of_the_layout(tmp_path: Path) -> None:
    one = load(tmp_path, "id: v\nsystem: Hi.\npolicy: Be short.\n").get("v")
    two = load(tmp_path, "# note\npolicy: 'Be short.'\nsystem: \"Hi.\"\nid: v\n").get("v")
    three = load(tmp_path, "id: v\nsystem: Hi.\npolicy: Be long.\n").get("v")
    assert one.sha256 == two.sha256 != three.sha256


def test_a_bare_off_is_the_word_and_not_yamls_false(tmp_path: Path) -> None:
    assert load(tmp_path, "id: v\nsystem: Hi.\nvolatile: off\n").get("v").volatile is VolatilePolicy.OFF
    assert load(tmp_path, "id: v\nsystem: Hi.\nvolatile: move\n").get("v").volatile is VolatilePolicy.MOVE


def test_newer_keys_change_the_hash_only_when_they_differ_from_their_default(tmp_path: Path) -> None:
    plain = load(tmp_path, "id: v\nsystem: Hi.\n").get("v")
    default = load(tmp_path, "id: v\nsystem: Hi.\nsummarizer: extractive\nvolatile: null\n").get("v")
    engine = load(tmp_path, "id: v\nsystem: Hi.\nsummarizer: engine\n").get("v")
    moving = load(tmp_path, "id: v\nsystem: Hi.\nvolatile: move\n").get("v")
    assert plain.sha256 == default.sha256
    assert len({plain.sha256, engine.sha256, moving.sha256}) == 3


def test_a_version_knows_its_file_and_all_are_listed_by_id(tmp_path: Path) -> None:
    load(tmp_path, "id: b\nsystem: Hi.\n", "1.yaml")
    versions = load(tmp_path, "id: a\nsystem: Hi.\n", "2.yaml")
    assert [version.id for version in versions.all] == ["a", "b"]
    assert versions.file_of("b") == str(tmp_path / "1.yaml")


def test_an_unknown_version_is_refused_naming_the_known_ones(tmp_path: Path) -> None:
    versions = load(tmp_path, "id: v1\nsystem: Hi.\n")
    assert versions.ids == ("v1",)
    with pytest.raises(UnknownPromptVersion, match="'v2' is not registered; known: v1") as caught:
        versions.get("v2")
    assert caught.value.param == "prompt_version"
    with pytest.raises(UnknownPromptVersion, match="known: none"):
        PromptVersions().get("v2")


def test_a_long_list_of_known_ones_is_cut() -> None:
    versions = PromptVersions(PromptVersion(id=f"v{n:02}", system="Hi.") for n in range(30))
    with pytest.raises(UnknownPromptVersion, match=r"v09, …$"):
        versions.get("x" * 10_000)


@pytest.mark.parametrize(
    ("body", "fault"),
    [
        (
            "id: v\nsystem: Hi.\nsytem: Ho.\n",
            r"unknown key 'sytem' \(did you mean 'system'\?\); allowed: budgets, grounding_rule, id,",
        ),
        ("id: v\n", "system: Field required"),
        ("id: 2.1\nsystem: Hi.\n", "id: .*string; given: 2.1"),
        ("id: a b\nsystem: Hi.\n", "id: .*pattern.*; given: 'a b'"),
        ("id: v\nsystem: ''\n", "system: .*at least 1 character; given: ''"),
        (
            "id: v\nsystem: Hi.\nvolatile: maybe\n",
            "volatile: .*'move', 'report' or 'off'; given: 'maybe'",
        ),
        ("id: v\nsystem: Hi.\nsummarizer: 3\n", "summarizer: .*'extractive'.*; given: 3"),
        ("id: v\nsystem: Hi.\nreserve: 0\n", "reserve: .*greater than or equal to 1; given: 0"),
        ("id: v\nsystem: Hi.\nbudgets: {system: '9'}\n", r"budgets\.system: .*integer; given: '9'"),
        (
            "id: v\nsystem: Hi.\nbudgets: {turns: 9}\n",
            r"unknown key 'budgets\.turns'; allowed: older_summary, ",
        ),
        ("id: v\nsystem: Hi.\nsystem: Ho.\n", "the key 'system' is given twice"),
        ("id: v\nsystem: Hi.\n? [a]\n: b\n", "not valid YAML"),
        ("- id: v\n", "the file: .*dictionary.*; given: an array of 1 item"),
        ("", "the file: .*dictionary.*; given: None"),
        ("id: [v\n", "not valid YAML"),
        ("id: !!python/object:os.system v\n", "not valid YAML"),
        ("x" * (MAX_FILE_BYTES + 1), f"longer than {MAX_FILE_BYTES:,} bytes, the most that is allowed"),
    ],
)
def test_a_wrong_file_stops_the_start_naming_file_key_given_and_allowed(
    tmp_path: Path, body: str, fault: str
) -> None:
    with pytest.raises(PromptFileError, match=rf"v\.yaml.*: .*{fault}"):
        load(tmp_path, body)


def test_two_files_of_one_id_are_refused_naming_both(tmp_path: Path) -> None:
    load(tmp_path, "id: v\nsystem: Hi.\n", "a.yaml")
    with pytest.raises(PromptFileError, match=r"b\.yaml: id: given 'v', which .*a\.yaml has"):
        load(tmp_path, "id: v\nsystem: Ho.\n", "b.yaml")


def test_no_versions_are_registered_where_no_folder_is_configured_or_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert PromptVersions.configured(None).ids == ()
    with pytest.raises(PromptFileError, match="prompts: no such folder"):
        PromptVersions.configured("prompts")


def test_a_folder_that_is_not_there_and_a_file_that_is_no_text_are_named(tmp_path: Path) -> None:
    with pytest.raises(PromptFileError, match="nowhere: no such folder"):
        PromptVersions.from_folder(tmp_path / "nowhere")
    (tmp_path / "v.yaml").write_bytes(b"\xff\xfe")
    with pytest.raises(PromptFileError, match=r"v\.yaml: byte 0 is not UTF-8"):
        PromptVersions.from_folder(tmp_path)
