"""The report's page: its template and its style sheet. Every value is escaped except the charts, which plotly wrote."""

from __future__ import annotations

from jinja2 import Environment, StrictUndefined, Template

# The policy lets the page run what it carries and load nothing: a report can be opened anywhere, by anyone.
POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"

STYLE = """
:root { color-scheme: light dark; --ink: #1c2228; --soft: #5b6570; --line: #dde1e6; --page: #f7f8f9; --card: #ffffff;
  --good: #1f7a4d; --bad: #b23a32; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e3e7eb; --soft: #98a2ad; --line: #2c343d; --page: #12161a; --card: #191e24;
    --good: #63c596; --bad: #ec8a82; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink); line-height: 1.5; font-size: 15px;
  font-family: system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; font-variant-numeric: tabular-nums; }
main { max-width: 1160px; margin: 0 auto; padding: 28px 20px 60px; }
h1 { font-size: 26px; line-height: 1.25; margin: 0 0 4px; letter-spacing: -0.01em; }
h2 { font-size: 20px; margin: 0; letter-spacing: -0.01em; overflow-wrap: anywhere; }
h3 { font-size: 16px; margin: 32px 0 10px; }
h4 { font-size: 13.5px; font-weight: 600; margin: 0 0 4px; }
p { margin: 4px 0; }
a { color: inherit; }
.soft { color: var(--soft); font-size: 13.5px; overflow-wrap: anywhere; }
.run { margin-top: 36px; padding-top: 20px; border-top: 1px solid var(--line); }
.problem { border-left: 3px solid var(--bad); padding-left: 10px; font-size: 13.5px; overflow-wrap: anywhere; }
nav { display: flex; flex-wrap: wrap; gap: 4px 18px; margin-top: 10px; font-size: 14px; }
.numbers { display: grid; grid-template-columns: repeat(auto-fill, minmax(160px, 1fr)); gap: 12px; margin: 18px 0 0; }
.numbers > div, .card { background: var(--card); border: 1px solid var(--line); border-radius: 8px;
  padding: 12px 14px; }
.numbers > div { display: flex; flex-direction: column-reverse; justify-content: flex-end; min-width: 0; }
.numbers dt { color: var(--soft); font-size: 13px; line-height: 1.35; }
.numbers dd { margin: 0 0 2px; font-size: 24px; line-height: 1.25; font-weight: 600; overflow-wrap: anywhere; }
.numbers dd.text { font-size: 16px; }
.charts { display: grid; grid-template-columns: repeat(2, minmax(0, 1fr)); gap: 14px; }
.card.wide { grid-column: 1 / -1; }
.card { min-width: 0; overflow: hidden; }
.card .soft { font-size: 12.5px; }
details { background: var(--card); border: 1px solid var(--line); border-radius: 8px; margin-top: 14px; }
summary { cursor: pointer; padding: 10px 14px; font-weight: 600; font-size: 14px; }
details > div { overflow-x: auto; padding: 0 14px 12px; }
pre { margin: 0; font: 12.5px/1.5 ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; }
table { border-collapse: collapse; width: 100%; font-size: 13.5px; }
th { text-align: left; color: var(--soft); font-weight: 600; padding: 6px 10px; border-bottom: 1px solid var(--line); }
td { vertical-align: top; padding: 8px 10px; border-bottom: 1px solid var(--line); }
tr:last-child td { border-bottom: 0; }
.metrics td, .metrics th { padding: 3px 10px; white-space: nowrap; }
.metrics td + td, .metrics th + th { text-align: right; }
.samples { table-layout: fixed; }
.samples td > div { white-space: pre-wrap; overflow-wrap: anywhere; max-height: 15em; overflow-y: auto; }
.samples .answer { width: 13%; } .samples .prompt { width: 25%; }
.reward { font-weight: 600; } .up { color: var(--good); } .down { color: var(--bad); }
.js-plotly-plot .xtick text, .js-plotly-plot .ytick text, .js-plotly-plot .legendtext, .js-plotly-plot .annotation-text,
.js-plotly-plot .xtitle, .js-plotly-plot .ytitle { fill: var(--ink) !important; }
.js-plotly-plot .hoverlayer .legendtext { fill: #f2f4f6 !important; }
@media (max-width: 760px) {
  main { padding: 18px 12px 40px; }
  .charts { grid-template-columns: minmax(0, 1fr); }
  .numbers { grid-template-columns: repeat(2, minmax(0, 1fr)); gap: 8px; }
  .numbers dd { font-size: 20px; }
  .card { padding: 10px 8px; }
  .samples thead { display: none; }
  .samples tr { display: block; padding: 8px 0; border-bottom: 1px solid var(--line); }
  .samples td { display: block; border: 0; padding: 4px 10px; }
  .samples td::before { content: attr(data-title); display: block; color: var(--soft); font-size: 12px; }
}
"""

PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{{ policy }}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{{ title }}</title>
<style>{{ style | safe }}</style>
</head>
<body>
<main>
<h1>{{ title }}</h1>
{% if runs | length > 1 %}
<nav>{% for run in runs %}<a href="#run-{{ loop.index }}">{{ loop.index }}. {{ run.name }}</a>{% endfor %}</nav>
{% endif %}
{% for run in runs %}
<section class="run" id="run-{{ loop.index }}">
<h2>{% if runs | length > 1 %}{{ loop.index }}. {% endif %}{{ run.name }}</h2>
<p class="soft">{{ run.extent }}</p>
{% if run.missing %}
<p class="soft">Not in this run directory: {{ run.missing | join(", ") }}.</p>
{% endif %}
{% for problem in run.problems %}<p class="problem">{{ problem }}</p>
{% endfor %}
{% if run.numbers %}
<dl class="numbers">
{% for number in run.numbers %}
<div><dt>{{ number.label }}</dt><dd{% if number.text %} class="text"{% endif %}>{{ number.value }}</dd></div>
{% endfor %}
</dl>
{% endif %}
{% for block in run.blocks %}
<h3>{{ block.title }}</h3>
<div class="charts">
{% for chart in block.charts %}
<div class="card{% if chart.wide or loop.last and loop.index is odd %} wide{% endif %}">
<h4>{{ chart.title }}</h4>
{{ chart.html | safe }}
{% for note in chart.notes %}<p class="soft">{{ note }}</p>
{% endfor %}
</div>
{% endfor %}
</div>
{% for note in block.notes %}<p class="soft">{{ note }}</p>
{% endfor %}
{% endfor %}
{% if run.samples %}
<h3>Samples before and after</h3>
<p class="soft">{{ run.samples.note }}</p>
<div class="card">
<table class="samples">
<thead><tr><th class="prompt">Prompt</th><th class="answer">Expected</th>
{% for heading in run.samples.headings %}<th>{{ heading }}</th>{% endfor %}</tr></thead>
<tbody>
{% for row in run.samples.rows %}
<tr><td data-title="Prompt"><div>{{ row.prompt }}</div></td><td data-title="Expected"><div>{{ row.answer }}</div></td>
{% for cell in row.cells %}
<td data-title="{{ run.samples.headings[loop.index0] }}">
{% if cell %}<span class="reward {{ cell.trend }}">reward {{ cell.reward }}</span><div>{{ cell.response }}</div>
{% else %}<span class="soft">not sampled at this step</span>{% endif %}
</td>
{% endfor %}
</tr>
{% endfor %}
</tbody>
</table>
</div>
{% endif %}
{% if run.metrics %}
<details><summary>All {{ run.metrics | length }} metrics</summary><div>
<table class="metrics">
<thead><tr><th>metric</th><th>steps</th><th>first</th><th>last</th><th>lowest</th><th>highest</th></tr></thead>
<tbody>
{% for row in run.metrics %}<tr>{% for cell in row %}<td>{{ cell }}</td>{% endfor %}</tr>
{% endfor %}
</tbody>
</table>
</div></details>
{% endif %}
{% if run.config is not none %}
<details><summary>Configuration</summary><div><pre>{{ run.config }}</pre></div></details>
{% endif %}
</section>
{% endfor %}
</main>
</body>
</html>
"""


def page_template() -> Template:
    """The compiled template: takes `title`, `policy`, `style`, `runs`; a name it lacks is an error."""
    return Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True).from_string(PAGE)
