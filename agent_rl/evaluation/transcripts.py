"""The transcripts of an evaluation as one page that needs nothing else: sampled tokens coloured, all others dim."""

from __future__ import annotations

import html
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from agent_rl.evaluation.report import COLUMNS, table_rows
from agent_rl.evaluation.store import Row, final_rows, read_rows

PAGE = "transcripts.html"
MOST = 200
"""Episodes of a page by default: a page of thousands opens in no browser."""

STYLE = """
:root{color-scheme:light dark;--ink:#1b1f24;--paper:#fff;--dim:#77808a;--line:#d8dee4;--good:#12703a;--bad:#a3271f;
--own:#0b57b0;--own-back:#e9f2ff}
@media(prefers-color-scheme:dark){:root{--ink:#e6e8ea;--paper:#14171a;--dim:#88919b;--line:#30363d;--good:#4ac26b;
--bad:#ff7b72;--own:#9ecbff;--own-back:#16263a}}
body{font:15px/1.5 system-ui,sans-serif;color:var(--ink);background:var(--paper);max-width:64rem;margin:2rem auto;
padding:0 1rem}
table{border-collapse:collapse;display:block;overflow-x:auto}
td,th{padding:.25rem .6rem;border-bottom:1px solid var(--line);text-align:right;white-space:nowrap}
td:first-child,th:first-child{text-align:left}
details{border-bottom:1px solid var(--line);padding:.4rem 0}summary{cursor:pointer}
pre{white-space:pre-wrap;overflow-wrap:anywhere;font:13px/1.5 ui-monospace,monospace;color:var(--dim);margin:.5rem 0}
.own{color:var(--own);background:var(--own-back)}.correct{color:var(--good)}
.wrong,.unparsable,.timeout,.void{color:var(--bad)}
.controls{display:flex;gap:.6rem;flex-wrap:wrap;margin:1rem 0}
input,select{font:inherit;padding:.3rem}small{color:var(--dim)}
"""

SCRIPT = """
const all=[...document.querySelectorAll('details')],text=document.getElementById('q'),kind=document.getElementById('v'),
part=document.getElementById('p'),count=document.getElementById('n');
function show(){const q=text.value.toLowerCase();let n=0;for(const d of all){
const on=(!kind.value||d.dataset.v===kind.value)&&
(!part.value||d.dataset.p===part.value)&&(!q||d.textContent.toLowerCase().includes(q));
d.hidden=!on;n+=on}count.textContent=n}
for(const c of [text,kind,part])c.addEventListener('input',show);show();
"""


def write_page(folder: Path, tree: Mapping[str, Any], tokenizer: Any = None, *, most: int = MOST) -> Path:
    """``transcripts.html`` with at most ``most`` episodes: first samples of all problems before second ones.

    Args:
        tree: the results.
        tokenizer: decodes the episodes' ids; without one, messages are shown and the model's own coloured.
    """
    rows = sorted(final_rows(row for row, _ in read_rows(folder)), key=lambda r: (r.sample, r.part, r.place))
    chosen = {(row.key, row.attempt) for row in rows[:most]}
    pieces: dict[tuple[str, str, int], str] = {}
    for row, transcript in read_rows(folder):
        if (row.key, row.attempt) in chosen:
            pieces[row.key] = _episode(row, transcript, tokenizer)
    left = f" (the first {most} of {len(rows)}; all are in episodes.jsonl)" if len(rows) > most else ""
    parts = sorted({row.part for row in rows[:most]})
    verdicts = sorted({row.verdict for row in rows[:most]})
    table = "".join(
        "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in table_rows(tree)
    )
    page = f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width,initial-scale=1">
<title>{html.escape(tree["title"])}</title><style>{STYLE}</style></head><body>
<h1>{html.escape(tree["title"])}</h1>
<table><tr>{"".join(f"<th>{html.escape(name)}</th>" for name in COLUMNS)}</tr>{table}</table>
<p><small><span class="own">coloured</span>: sampled by the model. Dim: prompt, template, tool output.</small></p>
<div class="controls"><input id="q" placeholder="search" aria-label="search">
<select id="v" aria-label="verdict"><option value="">every verdict</option>{_options(verdicts)}</select>
<select id="p" aria-label="part"><option value="">every part</option>{_options(parts)}</select>
<small><span id="n"></span> episodes{left}</small></div>
{"".join(pieces[row.key] for row in rows[:most])}
<script>{SCRIPT}</script></body></html>
"""
    path = folder / PAGE
    aside = folder / f"{PAGE}.partial"
    aside.write_text(page, encoding="utf-8", errors="replace")
    aside.rename(path)
    return path


def _options(names: Sequence[str]) -> str:
    return "".join(f"<option>{html.escape(name)}</option>" for name in names)


def _episode(row: Row, transcript: Mapping[str, Any], tokenizer: Any) -> str:
    facts = [f"gold {row.gold}", f"answer {row.answer}", f"ended by {row.stop}", f"{row.sampled_tokens} tokens"]
    facts += [f"{row.turns} turns", *(f"{status} {count}" for status, count in row.calls.items())]
    if row.failure:
        facts.append(row.failure)
    if tokenizer is not None and transcript["token_ids"]:
        body = _by_tokens(transcript["token_ids"], transcript["spans"], tokenizer)
    else:
        body = _by_messages(transcript["messages"])
    return (
        f'<details data-v="{row.verdict}" data-p="{html.escape(row.part)}"><summary><b class="{row.verdict}">'
        f"{row.verdict}</b> {html.escape(row.problem)} <small>sample {row.sample}</small></summary>"
        f"<small>{html.escape(' | '.join(facts))}</small><pre>{body}</pre></details>\n"
    )


def _by_tokens(ids: Sequence[int], spans: Sequence[Sequence[int]], tokenizer: Any) -> str:
    pieces, end = [], 0
    for start, stop in spans:
        pieces.append(html.escape(tokenizer.decode(ids[end:start], skip_special_tokens=False)))
        own = html.escape(tokenizer.decode(ids[start:stop], skip_special_tokens=False))
        pieces.append(f'<span class="own">{own}</span>')
        end = stop
    pieces.append(html.escape(tokenizer.decode(ids[end:], skip_special_tokens=False)))
    return "".join(pieces)


def _by_messages(messages: Sequence[Mapping[str, Any]]) -> str:
    pieces = []
    for message in messages:
        content = message.get("content")
        text = html.escape(content if isinstance(content, str) else json.dumps(content))
        own = message["role"] == "assistant"
        pieces.append(
            f"[{html.escape(str(message['role']))}]\n" + (f'<span class="own">{text}</span>' if own else text)
        )
    return "\n\n".join(pieces)
