"""The style of a page, and the script that sorts its tables: the page is whole without it."""

from __future__ import annotations

import hashlib
from base64 import b64encode

STYLE = """
:root { color-scheme: light dark; --ground: #ffffff; --card: #f6f7f9; --line: #d5d9e0;
  --ink: #1b1f26; --soft: #545c69; --accent: #1f5fbf; --live: #2f6fd0; --pad: #e08a1e;
  --warm: #8fa3bd; --eager: #c9482f; --error: #b3261e; --warning: #8a5300; --note: #3c5a86;
  --good: #1c7040; --empty: #e9ecf1; }
@media (prefers-color-scheme: dark) { :root { --ground: #14171c; --card: #1d2128; --line: #363c47;
  --ink: #e9ecf1; --soft: #a9b2c0; --accent: #8ab4ff; --live: #5e97ea; --pad: #eda547;
  --warm: #71839b; --eager: #f0806a; --error: #ff9a8f; --warning: #f5bd62; --note: #a9c4ee;
  --good: #7fd6a2; --empty: #2a2f38; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--ground); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", sans-serif; }
main, header { max-width: 1080px; margin: 0 auto; padding: 0 24px; }
header { padding-top: 28px; }
h1 { font-size: 1.6rem; margin: 0; line-height: 1.25; }
h2 { font-size: 1.2rem; margin: 40px 0 4px; }
h3 { font-size: 1rem; margin: 26px 0 4px; }
p { margin: 4px 0 12px; }
a { color: var(--accent); }
.soft { color: var(--soft); }
code, pre, .mono { font-family: ui-monospace, "SF Mono", Menlo, Consolas, monospace;
  font-size: .92em; }
ul.findings { list-style: none; padding: 0; margin: 14px 0; display: grid; gap: 10px; }
.finding { border: 1px solid var(--line); border-left: 5px solid var(--note); border-radius: 6px;
  background: var(--card); padding: 10px 14px; }
.finding.error { border-left-color: var(--error); }
.finding.warning { border-left-color: var(--pad); }
.finding strong { overflow-wrap: anywhere; }
.finding pre { white-space: pre-wrap; overflow-wrap: anywhere; margin: 6px 0; color: var(--soft); }
.finding p { margin: 2px 0; overflow-wrap: anywhere; }
.level { font-weight: 700; margin-right: .5em; }
.level.error { color: var(--error); } .level.warning { color: var(--warning); }
.level.note { color: var(--note); } .level.good { color: var(--good); }
dl.tiles { display: grid; grid-template-columns: repeat(auto-fill, minmax(132px, 1fr)); gap: 10px;
  margin: 16px 0; }
dl.tiles div { background: var(--card); border: 1px solid var(--line); border-radius: 6px;
  padding: 8px 12px; }
dl.tiles dt { color: var(--soft); font-size: .85rem; }
dl.tiles dd { margin: 0; font-size: 1.25rem; font-variant-numeric: tabular-nums; }
dl.tiles dd small { font-size: .8rem; color: var(--soft); display: block; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: 5px 10px 5px 0; border-bottom: 1px solid var(--line);
  vertical-align: middle; }
thead th { color: var(--soft); font-weight: 600; font-size: .87rem; white-space: nowrap; }
tbody th { font-weight: 500; min-width: 10.5em; }
td.n, th.n { text-align: right; white-space: nowrap; }
tbody th.n { width: 6em; min-width: 0; }
td.wide { width: 50%; min-width: 110px; }
th small { display: block; font-weight: 400; color: var(--soft); }
td.n .track { height: 6px; margin: 2px 0 0 auto; min-width: 70px; }
.track { height: 14px; background: var(--empty); border-radius: 3px; overflow: hidden; }
.track svg { display: block; width: 0; min-width: 100%; height: 100%; }
.live { background: var(--live); } .pad { background: var(--pad); }
.warm { background: var(--warm); } .eager { background: var(--eager); }
.key { display: inline-flex; align-items: center; gap: 6px; margin-right: 16px; }
.key i { width: 14px; height: 14px; border-radius: 3px; }
.hot { color: var(--warning); font-weight: 700; }
.badge { white-space: nowrap; }
.badge.quarantined { color: var(--error); font-weight: 700; } .badge.tried { color: var(--good); }
button.sort { font: inherit; color: inherit; background: none; border: 0; padding: 2px 0;
  cursor: pointer; white-space: nowrap; }
button.sort::after { content: " \\2195"; opacity: .6; }
th[aria-sort=ascending] button.sort::after { content: " \\2191"; opacity: 1; }
th[aria-sort=descending] button.sort::after { content: " \\2193"; opacity: 1; }
:focus-visible { outline: 2px solid var(--accent); outline-offset: 2px; }
svg .live { fill: var(--live); } svg .eager { fill: var(--eager); } svg .warm { fill: var(--warm); }
svg .pad { fill: var(--pad); }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(300px, 100%), 1fr));
  gap: 8px 28px; }
figure { margin: 8px 0 12px; } figcaption { font-weight: 600; font-size: .87rem; }
.curves { display: block; width: 100%; height: 220px; padding: 0 20px 0 70px; overflow: visible; }
.curves text { fill: var(--soft); font-size: 12px; text-anchor: end; }
.curves .below { text-anchor: middle; }
.curves line { stroke-width: 2; } .curves line.live { stroke: var(--live); }
.curves line.eager { stroke: var(--eager); }
.curves line.grid { stroke: var(--line); stroke-width: 1; }
details { margin: 16px 0; } summary { cursor: pointer; font-weight: 600; }
.skip { position: absolute; left: -9999px; } .skip:focus { left: 12px; top: 8px; }
footer { max-width: 1080px; margin: 48px auto 24px; padding: 0 24px; color: var(--soft);
  font-size: .87rem; }
@media (max-width: 600px) { main, header, footer { padding-left: 14px; padding-right: 14px; }
  dl.tiles { grid-template-columns: 1fr 1fr; } th, td { padding-right: 8px; }
  td.wide { min-width: 84px; } .finding { padding: 8px 10px; } }
@media print { .scroll { overflow: visible; } }
"""

SCRIPT = """
for (const button of document.querySelectorAll("button.sort")) button.onclick = () => {
  const head = button.closest("th"), table = head.closest("table"), body = table.tBodies[0];
  const at = [...head.parentNode.children].indexOf(head);
  const down = head.getAttribute("aria-sort") !== "descending";
  for (const each of head.parentNode.children) each.removeAttribute("aria-sort");
  head.setAttribute("aria-sort", down ? "descending" : "ascending");
  const value = row => row.children[at].dataset.v ?? row.children[at].textContent;
  const number = table.tBodies[0].rows[0]?.children[at].dataset.v !== undefined;
  body.append(...[...body.rows].sort((a, b) => (down ? -1 : 1) *
    (number ? value(a) - value(b) : value(a).localeCompare(value(b), "en", {numeric: true}))));
};
"""


def _hash(text: str) -> str:
    return f"'sha256-{b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


POLICY = (
    f"default-src 'none'; style-src {_hash(STYLE)}; script-src {_hash(SCRIPT)}; "
    "base-uri 'none'; form-action 'none'"
)
"""The content security policy: nothing runs, styles or is loaded but the two texts above. Should a
text of a file ever get into the page unescaped, no script in it runs."""
