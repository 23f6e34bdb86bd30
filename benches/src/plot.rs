//! Cost against connections as SVG, drawn by hand so that it needs nothing and stays small.

use crate::report::{Look, of};
use anyhow::{Context, Result};
use std::fmt::Write;

const LEFT: f64 = 90.0;
const RIGHT: f64 = 690.0;
const TOP: f64 = 80.0;
const BOTTOM: f64 = 440.0;
const WIDTH: f64 = 960.0;
const HEIGHT: f64 = 500.0;
/// Powers of ten, in seconds.
const LOWEST: i32 = -6;
const HIGHEST: i32 = 0;

const STYLE: &str = "\
text { font: 13px -apple-system, 'Segoe UI', 'DejaVu Sans', sans-serif; fill: #1f2328 }
.title { font-size: 16px; font-weight: 600 } .small { font-size: 12px; fill: #59636e }
.page { fill: #ffffff; stroke: #d1d9e0 } .grid { stroke: #e4e8ec }
.line { fill: none; stroke-width: 2.5 } .peer { stroke: #59636e } .ours { stroke: #1a7f37 } .proc { stroke: #4c84d6 }
.limit { stroke: #59636e; stroke-dasharray: 4 3 } .none { stroke: none } .dot { stroke: none; fill: #1f2328 }
@media (prefers-color-scheme: dark) {
text { fill: #f0f6fc } .small { fill: #9198a1 }
.page { fill: #0d1117; stroke: #3d444d } .grid { stroke: #262c36 }
.peer, .limit { stroke: #9198a1 } .ours { stroke: #3fb950 } .proc { stroke: #4184e4 } .dot { fill: #f0f6fc }
}";

/// The lines: what is measured, its class, its words.
const LINES: [(&str, &str, &str); 5] = [
    ("netstat", "peer", "netstat loop's body"),
    ("ss", "peer", "ss -ltnpH"),
    ("proc", "proc", "outlast, proc"),
    ("dump", "limit", "bare dump of the listeners"),
    ("diag", "ours", "outlast, diag"),
];

pub(crate) fn draw(looks: &[Look]) -> Result<String> {
    let most = f64::from(looks.last().context("no looks")?.connections);
    // Even steps for 0, 200, 2,000 and 9,000 would hide their distances, a plain scale the first of them.
    let x = |connections: u32| LEFT + (f64::from(connections) / most).sqrt() * (RIGHT - LEFT);
    let y = |seconds: f64| {
        let part = (seconds.log10() - f64::from(LOWEST)) / f64::from(HIGHEST - LOWEST);
        BOTTOM - part * (BOTTOM - TOP)
    };
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" width=\"{WIDTH}\" height=\"{HEIGHT}\" \
         role=\"img\">\n<title>CPU time of one look against the connections in the Pod</title>\n<style>{STYLE}</style>\n\
         <rect class=\"page\" x=\".5\" y=\".5\" width=\"{}\" height=\"{}\" rx=\"6\"/>\n\
         <text class=\"title\" x=\"20\" y=\"32\">CPU time of one look at the Pod, against its connections</text>\n\
         <text class=\"small\" x=\"20\" y=\"52\">20 listeners, which hold; half of the connections are Envoy's; each line of \
         the grid is ten times the one below</text>\n",
        WIDTH - 1.0,
        HEIGHT - 1.0
    );
    let names = ["1 µs", "10 µs", "100 µs", "1 ms", "10 ms", "100 ms", "1 s"];
    for (power, name) in (LOWEST..=HIGHEST).zip(names) {
        let at = y(10_f64.powi(power));
        writeln!(svg, "<path class=\"grid\" d=\"M{LEFT} {at:.1}H{RIGHT}\"/>")?;
        writeln!(
            svg,
            "<text class=\"small\" x=\"{}\" y=\"{:.1}\" text-anchor=\"end\">{name}</text>",
            LEFT - 10.0,
            at + 4.0
        )?;
    }
    for look in looks {
        let (at, words) = (x(look.connections), look.connections);
        writeln!(
            svg,
            "<text class=\"small\" x=\"{at:.1}\" y=\"{}\" text-anchor=\"middle\">{words}</text>",
            BOTTOM + 20.0
        )?;
    }
    writeln!(
        svg,
        "<text class=\"small\" x=\"{}\" y=\"{}\" text-anchor=\"middle\">connections (scale by root)</text>",
        f64::midpoint(LEFT, RIGHT),
        BOTTOM + 42.0
    )?;
    let mut labels = Vec::new();
    for (name, class, words) in LINES {
        let mut path = String::new();
        let mut last = 0.0;
        for look in looks {
            last = y(of(&look.samples, name)?.median());
            let command = if path.is_empty() { 'M' } else { 'L' };
            write!(path, "{command}{:.1} {last:.1}", x(look.connections))?;
            writeln!(
                svg,
                "<circle class=\"dot\" cx=\"{:.1}\" cy=\"{last:.1}\" r=\"2.5\"/>",
                x(look.connections)
            )?;
        }
        writeln!(svg, "<path class=\"line {class}\" d=\"{path}\"/>")?;
        labels.push((last, words));
    }
    // Labels that would lie on each other move apart.
    labels.sort_by(|one, other| one.0.total_cmp(&other.0));
    let mut free = 0.0_f64;
    for (at, words) in labels {
        let at = at.max(free);
        free = at + 17.0;
        writeln!(svg, "<text x=\"{}\" y=\"{:.1}\">{words}</text>", RIGHT + 12.0, at + 4.0)?;
    }
    Ok(svg + "</svg>\n")
}
