"""Prompt images in the report and on the live page, in Chromium."""

from __future__ import annotations

from pathlib import Path

from megarl import report
from tests.browser.chromium import browse_with
from tests.browser.test_images import choose, take_pictures
from tests.live_report import serving
from tests.prompt_image_run import encoded, prompt, write_step

MARKUP = '<img src=x onerror=alert(1)></script><b>"bold"</b>'

BOX_OF = """function boxOf(item) {
  const {left, top, right, bottom} = item.getBoundingClientRect();
  return [left, top, right, bottom];
}"""
CONTENTS = """[...document.querySelector(SELECTOR).childNodes].map((node) =>
  node.nodeType === Node.TEXT_NODE ? node.textContent : {
    text: node.innerText,
    width: node.querySelector('img').naturalWidth,
    box: boxOf(node.querySelector('img')),
  })"""
TEXT_BOX = """(() => {
  const range = document.createRange();
  range.selectNodeContents([...document.querySelectorAll(SELECTOR)][0].firstChild);
  return boxOf(range);
})()"""


def test_images_are_in_their_places_in_the_prompt(tmp_path: Path) -> None:
    folder = tmp_path / "shapes"
    photo = encoded((20, 90, 160), 800, 400, "JPEG")
    items = [
        prompt("p", f"user\n{MARKUP} ", photo, "\nWhich is larger?\n", encoded((200, 40, 30), 20, 30), "\nassistant\n"),
        prompt("q", "a prompt without images"),
    ]
    write_step(folder, 1, items, 3)
    with serving(folder) as address, browse_with(tmp_path, address) as tab:
        write_step(folder, 2, items, 3)
        tab.until("steps.length === 2 && document.querySelectorAll('#samples .prompt-image img').length === 6")
        assert tab.eval("Object.keys(thumbnails).length") == 2  # the steps share them
        tab.eval("updateSteps([2], [], {unused: {}})")  # of a step that is no longer shown
        assert tab.eval("Object.keys(thumbnails).length") == 2
        assert tab.problems == []
    report.write(folder)
    with browse_with(tmp_path / "report", (folder / "report.html").as_uri()) as tab:
        tab.eval(BOX_OF)
        for view, selector in (("samples", ".sample:nth-child(4) pre"), ("groups", "#samples .group .prompt pre")):
            choose(tab, "view", view)
            take_pictures(tab, f"prompt_images_{view}", "#viewer")
            tab.eval(f"document.querySelector('{selector}').scrollIntoView({{block: 'center'}})")
            first, large, middle, small, last = tab.eval(CONTENTS.replace("SELECTOR", repr(selector)))
            assert (first, middle, last) == (f"user\n{MARKUP} ", "\nWhich is larger?\n", "\nassistant\n")
            assert (large["width"], small["width"]) == (256, 20)
            assert (large["text"], small["text"]) == ("30 tokens", "31 tokens")
            text = tab.eval(TEXT_BOX.replace("SELECTOR", repr(selector)))
            assert text[1] < large["box"][3] <= small["box"][1]  # below the first text, and one below the other
            left, top, right, bottom = large["box"]
            middle_point = f"{(left + right) / 2}, {(top + bottom) / 2}"
            assert tab.eval(f"document.elementFromPoint({middle_point}).tagName") == "IMG"  # visible
        assert not tab.eval("document.querySelector('main b:not(.reward)')")
        choose(tab, "text", "Which is larger")
        assert tab.eval("document.querySelectorAll('#samples .group').length") == 1
        choose(tab, "view", "steps")
        assert tab.eval("document.querySelectorAll('#samples .prompt img').length") == 2
        assert tab.eval("document.querySelectorAll('#evaluation-samples .prompt-image img').length") == 4
        assert tab.problems == []
