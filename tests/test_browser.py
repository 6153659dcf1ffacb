"""A reader with a browser sees the whole report: wide, narrow and on paper, every picture, every link."""

import re

import browser
import pytest
import synthetic_runs

import diagnostics.report as entry

WIDTHS = {"desk": 1085, "phone": 385, "print": browser.PAPER_WIDTH}  # windows of 1100 and 400 less a scroll bar


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    browser.browser()
    folder = tmp_path_factory.mktemp("report")
    synthetic_runs.runs_of_every_kind(folder / "runs")
    assert entry.main([f"--records={folder / 'runs'}", f"--output={folder / 'page'}"]) == 0
    return folder


@pytest.fixture(scope="module")
def page(folder):
    return (folder / "page" / "index.html").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def seen(page, folder):
    found, log = browser.look(page, folder, WIDTHS)
    assert "CONSOLE" not in log, log
    return found


@pytest.mark.parametrize("name", WIDTHS)
def test_the_page_is_no_wider_than_its_window(seen, name):
    assert seen[name]["width"] == WIDTHS[name]
    assert seen[name]["needed"] <= seen[name]["width"]


@pytest.mark.parametrize("name", ["desk", "print"])
def test_no_table_runs_out_of_the_page(seen, page, name):
    assert seen[name]["tables"] == page.count("<table") > 15
    assert seen[name]["wide_tables"] == [] and seen[name]["cut_cells"] == []


@pytest.mark.parametrize("name", WIDTHS)
def test_every_picture_is_there_and_described(seen, page, name):
    assert seen[name]["images"] == page.count("<img") > 25
    assert seen[name]["broken_images"] == []


def test_all_text_is_dark_enough(seen):
    assert seen["desk"]["text"] > 500 and seen["desk"]["faint"] == []


def test_it_prints(folder):
    target = folder / "page.pdf"
    browser.start(
        folder / "profile", f"--print-to-pdf={target}", "--no-pdf-header-footer", (folder / "page/index.html").as_uri()
    )
    printed = target.read_bytes()
    assert printed.startswith(b"%PDF") and len(re.findall(rb"/Type\s*/Page\b", printed)) > 5


def test_every_link_to_records_leads_somewhere(folder, page):
    links = re.findall(r'<a href="([^"]+)"', page)
    alone = page.count("<h2>") - page.count(
        "side by side</h2>"
    )  # what stands side by side is linked where it stands alone
    assert len(links) == alone + page.count("Records by position") > 7 and all(
        (folder / "page" / link).is_file() for link in links
    )


def test_a_page_with_faults_is_seen_through(folder):
    """The checks above would have failed: a wide table, a cut cell, a lost picture, faint text."""
    style = (
        "<style>table{table-layout:fixed} td{overflow:hidden;white-space:nowrap} @media print{} p{color:#ccc}</style>"
    )
    table = f'<table style="width:1200px"><tr><td>{"word " * 40}</td><td>b</td></tr></table>'
    picture = '<img alt="lost" src="data:image/png;base64,AAAA">'
    faulty = f"<!DOCTYPE html>{style}<body><div>{table}</div><p>faint</p>{picture}</body>"
    found, _ = browser.look(faulty, folder, WIDTHS)
    for name in WIDTHS:
        assert found[name]["needed"] > found[name]["width"]
        assert found[name]["faint"] == ["faint"] and found[name]["broken_images"] == ["lost"]
        assert found[name]["wide_tables"] and found[name]["cut_cells"]


def test_without_a_browser_it_is_said_and_ci_fails(monkeypatch):
    monkeypatch.setattr(browser.shutil, "which", lambda name: None)
    monkeypatch.delenv(browser.REQUIRED, raising=False)
    with pytest.raises(pytest.skip.Exception, match="install the system package chromium"):
        browser.browser()
    monkeypatch.setenv(browser.REQUIRED, "1")
    with pytest.raises(pytest.fail.Exception, match="install the system package chromium"):
        browser.browser()
