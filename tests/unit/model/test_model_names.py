"""Which names are refused, and by which rule."""

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sqlstreams.errors import ConfigurationError
from sqlstreams.model.names import MAX_NAME_BYTES, check_name, check_schema, quote_ident


@pytest.mark.parametrize(
    "name",
    [
        "a",
        "orders.placed",
        "Größe",
        "注文",
        'it\'s "quoted"',
        "a b",
        "%_\\*",
        "__system",
        "x" * MAX_NAME_BYTES,
        "😀",
    ],
)
def test_o7_names_of_every_script_and_with_quotes_are_fine(name):
    check_name("stream", name)


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("", "empty"),
        ("a\nb", "printable"),
        ("a\x00b", "printable"),
        ("a\x7fb", "printable"),
        ("a\u200bb", "printable"),
        ("a\u00a0b", "printable"),
        ("a\ud800", "printable"),
        ("x" * 201, "200 bytes"),
        ("é" * 101, "200 bytes"),
        (" a", "white space"),
        ("a ", "white space"),
        ("__system.metrics", "reserved"),
        (b"a", "str, not bytes"),
        (None, "str, not NoneType"),
    ],
)
def test_o3_o7_a_bad_name_is_refused_by_its_rule(name, rule):
    with pytest.raises(ConfigurationError, match=rule) as caught:
        check_name("stream", name)
    assert caught.value.subject.startswith("stream")
    str(caught.value).encode()


def test_o3_the_system_may_use_its_own_names():
    check_name("stream", "__system.metrics", system=True)


@pytest.mark.parametrize("name", ["sqlstreams", "_x", "a1_b2", "x" * 48, "pgx", "information_schema2"])
def test_o6_plain_schemas_are_fine(name):
    check_schema(name)


@pytest.mark.parametrize(
    "name",
    [
        "",
        "A",
        "1a",
        "a-b",
        'a"b',
        "a b",
        "é",
        "a\n",
        "x" * 49,
        "pg_",
        "pg_catalog",
        "information_schema",
        "a\ud800",
        None,
    ],
)
def test_o7_other_schemas_are_refused(name):
    with pytest.raises(ConfigurationError) as caught:
        check_schema(name)
    assert caught.value.subject.startswith("schema")
    str(caught.value).encode()


@given(st.text(min_size=1).filter(lambda name: "\x00" not in name))
def test_o6_a_quoted_identifier_ends_where_it_should(name):
    quoted = quote_ident(name)
    assert quoted[0] == quoted[-1] == '"'
    assert quoted[1:-1].replace('""', "") == quoted[1:-1].replace('""', "").replace('"', "")
    assert quoted[1:-1].replace('""', '"') == name


@pytest.mark.parametrize("name", ["", "a\x00"])
def test_an_impossible_identifier_is_refused(name):
    with pytest.raises(ConfigurationError, match="identifier"):
        quote_ident(name)


@given(st.text())
def test_o7_a_name_that_is_taken_keeps_the_rules(name):
    with suppress(ConfigurationError):  # any other error fails the test
        check_name("group", name)
        assert 0 < len(name.encode()) <= MAX_NAME_BYTES
        assert name == name.strip()
