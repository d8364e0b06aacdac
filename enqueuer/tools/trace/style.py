"""The style sheet of a page, for light and dark screens."""

STYLE = """
:root { --back: #ffffff; --text: #1c2024; --faint: #6b7280; --line: #d9dde3; --card: #f5f6f8;
  --make: #3b78c3; --send: #e0a100; --wait: #c4cad3; --work: #3a9a5f; --idle: #d1495b;
  --read: #8a63b8; }
@media (prefers-color-scheme: dark) {
  :root { --back: #15181c; --text: #e6e8eb; --faint: #9aa2ad; --line: #343a42; --card: #1f242a;
    --make: #5b95dd; --send: #e8b53a; --wait: #4a525d; --work: #4fb477; --idle: #e46475;
    --read: #a583d0; } }
body { background: var(--back); color: var(--text); margin: 2rem auto; max-width: 60rem;
  padding: 0 1rem; font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; margin: 0; } h2 { font-size: 1.1rem; margin: 2rem 0 .5rem; }
p.faint, td.faint, .legend, figcaption { color: var(--faint); }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(9rem, 1fr)); gap: .7rem;
  margin: 1rem 0; }
.tiles div, .bottleneck, .warning { background: var(--card); border-radius: 8px;
  padding: .6rem .9rem; }
.tiles b { display: block; font-size: 1.3rem; } .tiles span { color: var(--faint); }
.bottleneck { border-left: 4px solid var(--make); margin: 1rem 0; }
.warning { border-left: 4px solid var(--idle); margin: 1rem 0; }
figure { margin: 0; } svg { width: 100%; height: auto; display: block; }
svg text { fill: var(--faint); font: 12px system-ui, sans-serif; }
.make { fill: var(--make); background: var(--make); }
.send { fill: var(--send); background: var(--send); }
.wait { fill: var(--wait); background: var(--wait); }
.work { fill: var(--work); background: var(--work); }
.idle { fill: var(--idle); background: var(--idle); }
.read { fill: var(--read); background: var(--read); }
.grid { stroke: var(--line); } .frame { fill: none; stroke: var(--line); }
.edge { stroke: var(--text); stroke-dasharray: 4 3; }
.mark { stroke: var(--faint); stroke-dasharray: 2 3; } .fault { fill: var(--idle); }
.legend i { display: inline-block; width: .8em; height: .8em; border-radius: 2px;
  margin: 0 .3em 0 1em; }
table { border-collapse: collapse; width: 100%; }
td, th { text-align: right; padding: .25rem .6rem; border-bottom: 1px solid var(--line);
  font-variant-numeric: tabular-nums; }
td:first-child, th:first-child, td.text { text-align: left; }
td { white-space: nowrap; } td.text { white-space: normal; } th { font-weight: 500; }
.bar { display: flex; height: .8rem; min-width: 9rem; border-radius: 3px; overflow: hidden; }
.bar i { display: block; }
"""
