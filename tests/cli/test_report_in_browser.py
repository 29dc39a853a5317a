"""The report in a browser: it opens without a network, nothing is missing, nothing sticks out on a phone."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from html import unescape
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.image import imread

from steelyard.cli.main import main

CONFIG = """
[model]
name = "llama3-8b"
[cluster]
device = "H200"
nodes = 2
[parallel]
tensor = 4
[run]
chunk_tokens = 16384
[documents]
median = 1000
sigma = 1.8
[sync]
mode = "diloco"
period = 50
[sampling]
batches = 2
[[sites]]
name = "north"
[[sites]]
name = "south, with a name that is longer than a phone is wide"
"""
SECTIONS = ["next", "sites", "policies", "split", "memory", "work", "timeline", "not-modelled"]
# Frames, since a window cannot be made as narrow as a phone.
WIDTHS = (360, 400, 500, 736, 800, 1280, 1400)
NARROW_BELOW = 736  # CSS pixels up to which a page shows the pictures that were drawn for a phone
SMALLEST_TEXT_PX = 7 / 72 * 96
FRAMES = (
    '<!DOCTYPE html><meta charset="utf-8"><pre id="found">nothing</pre>'
    + "".join(
        f'<iframe id="{width}" src="report.html" style="width:{width}px;height:900px;border:0"></iframe>'
        for width in WIDTHS
    )
    + """
<script>
const found = {errors: []};
addEventListener("error", e => found.errors.push(String(e.message)), true);
function inked(image) {  // share of pixels that are not white: drawing decodes the picture here and now
  const canvas = document.createElement("canvas");
  [canvas.width, canvas.height] = [image.naturalWidth, image.naturalHeight];
  canvas.getContext("2d").drawImage(image, 0, 0);
  const data = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
  let count = 0;
  for (let i = 0; i < data.length; i += 4) count += data[i] < 250 || data[i + 1] < 250 || data[i + 2] < 250;
  return count / (data.length / 4);
}
addEventListener("load", () => {
  for (const frame of document.querySelectorAll("iframe")) {
    const page = frame.contentDocument;
    const images = [...page.images];
    const width = page.documentElement.clientWidth;
    const out = [...page.body.querySelectorAll("h1,h2,p,b,li,img,.card,.answer,.scroll,figure,section")]
      .filter(e => e.getBoundingClientRect().right > width + 1).map(e => e.tagName + " " + e.textContent.slice(0, 40));
    found[frame.id] = {
      width, scroll: page.documentElement.scrollWidth, out,
      images: images.map(i => i.naturalWidth), shown: images.map(i => i.clientWidth), inked: images.map(inked),
      boxes: [...page.body.querySelectorAll("*")].filter(e => e.scrollWidth > e.clientWidth + 1 && e.clientWidth > 0)
        .filter(e => ["auto", "scroll"].includes(getComputedStyle(e).overflowX)).map(e => e.className),
      sections: [...page.querySelectorAll("section")].map(s => s.id),
      requests: performance.getEntriesByType("resource").map(r => r.name),
      first: page.body.innerText.slice(0, 600),
    };
  }
  document.getElementById("found").textContent = JSON.stringify(found);
});
</script>
"""
)


def browser() -> str:
    """Chromium, which continuous integration installs; elsewhere these tests are skipped without it."""
    for name in ("chromium", "chromium-browser", "google-chrome"):
        if path := shutil.which(name):
            return path
    if os.environ.get("CI"):
        pytest.fail("Chromium is missing; .ci/run installs it: apt-get install chromium")
    pytest.skip("Chromium is missing; on Debian: apt-get install chromium")


def open_page(path: Path, *flags: str, profile: Path) -> subprocess.CompletedProcess[str]:
    command = [
        browser(), "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run",
        "--disable-dev-shm-usage", "--disable-background-networking", "--host-resolver-rules=MAP * ~NOTFOUND",
        "--allow-file-access-from-files", "--enable-logging=stderr", f"--user-data-dir={profile}",
        "--virtual-time-budget=10000", *flags, path.as_uri(),
    ]  # fmt: skip
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    (folder / "c.toml").write_text(CONFIG)
    assert main(["simulate", str(folder / "c.toml"), "--policy", "all", "--plot", str(folder / "out")]) == 0
    return folder / "out" / "report.html"


def test_the_report_is_whole_at_every_width(report: Path, tmp_path: Path) -> None:
    browser()
    (report.parent / "frames.html").write_text(FRAMES)
    done = open_page(report.parent / "frames.html", "--dump-dom", profile=tmp_path)
    [text] = re.findall(r'<pre id="found">(.*?)</pre>', done.stdout, flags=re.DOTALL)
    found: dict[str, Any] = json.loads(unescape(text))
    assert found["errors"] == []
    assert "CONSOLE" not in done.stderr
    for width in WIDTHS:
        seen = found[str(width)]
        assert seen["width"] == width
        # Nothing is to be pushed sideways but wide tables, which have a box for it.
        assert seen["scroll"] <= width, seen["out"]
        assert seen["out"] == []
        assert set(seen["boxes"]) <= {"scroll"}
        assert [s for s in seen["sections"] if s != "answer"] == SECTIONS
        assert len(seen["images"]) == 4
        narrow = width <= NARROW_BELOW
        assert all(pixels < 1200 if narrow else pixels >= 1800 for pixels in seen["images"])
        for pixels, shown in zip(seen["images"], seen["shown"], strict=True):
            assert 10 / 72 * 200 * shown / pixels >= SMALLEST_TEXT_PX  # of text of 10 points in a picture of 200 dpi
        assert min(seen["inked"]) > 0.02
        assert all(r.startswith(("file:", "data:")) for r in seen["requests"])
        # The answer comes first: verdict, then the number with its band, then the cause.
        order = [seen["first"].find(part) for part in ("It fits", "A step takes", "Most of it goes to")]
        assert order == sorted(order)
        assert order[0] > 0


def test_the_report_is_painted(report: Path, tmp_path: Path) -> None:
    browser()
    shot = tmp_path / "shot.png"
    open_page(report, f"--screenshot={shot}", "--window-size=1280,4000", profile=tmp_path)
    pixels = np.round(imread(shot)[..., :3] * 255).astype(np.int64)
    assert pixels.shape[:2] == (4000, 1280)
    shades = pixels @ np.array([1 << 16, 1 << 8, 1])
    assert np.mean(shades == 0xFFFFFF) < 0.9
    for color in (0x009E73, 0x0072B2, 0x9FD0F0):  # of the verdict, of attention, of token-wise layers
        assert np.sum(shades == color) > 500
