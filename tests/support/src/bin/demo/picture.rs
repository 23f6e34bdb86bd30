//! The seven timelines as SVG, drawn by hand so that it needs nothing and stays small.

use crate::{BEFORE, Seen};
use std::fmt::Write;

const LEFT: f64 = 170.0;
const RIGHT: f64 = 770.0;
const WIDTH: f64 = 960.0;
const TOP: f64 = 80.0;
const ROW: f64 = 66.0;
const BAR: f64 = 16.0;
/// Height of the requests' marks.
const STRIP: f64 = 11.0;

/// Both schemes bring their own background, so that the page's does not matter.
const STYLE: &str = "\
text { font: 13px -apple-system, 'Segoe UI', 'DejaVu Sans', sans-serif; fill: #1f2328 }
.title { font-size: 16px; font-weight: 600 } .name { font-weight: 600 } .small { font-size: 12px; fill: #59636e }
.page { fill: #ffffff; stroke: #d1d9e0 } .grid { stroke: #e4e8ec } .zero { stroke: #59636e; stroke-dasharray: 4 3 }
.serving { fill: #1a7f37 } .finishing { fill: #8fd19e } .proxy { fill: #4c84d6 } .lost { stroke: #cf222e }
.answered { stroke: #afb8c1 } .cross { stroke: #cf222e; stroke-width: 3 }
.made { fill: #1a7f37 } .missed { fill: #cf222e }
@media (prefers-color-scheme: dark) {
text { fill: #f0f6fc } .small { fill: #9198a1 }
.page { fill: #0d1117; stroke: #3d444d } .grid { stroke: #262c36 } .zero { stroke: #9198a1 }
.serving { fill: #2ea043 } .finishing { fill: #1d5c2d } .proxy { fill: #4184e4 } .lost { stroke: #f85149 }
.answered { stroke: #59636e } .cross { stroke: #f85149 }
.made { fill: #3fb950 } .missed { fill: #f85149 }
}";

/// Draws what was seen.
pub(crate) fn draw(seen: &[Seen]) -> String {
    let begin = -BEFORE.as_secs_f64();
    let end = seen.iter().map(|s| s.proxy.max(s.application)).fold(10.0, f64::max).ceil();
    let x = |second: f64| LEFT + (second - begin) / (end - begin) * (RIGHT - LEFT);
    let rows = f64::from(u32::try_from(seen.len()).unwrap_or(0));
    let bottom = TOP + rows * ROW;
    let height = bottom + 84.0;
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height}\" width=\"{WIDTH}\" \
         height=\"{height}\" role=\"img\">\n<title>Seven ways to stop a Pod with a sidecar</title>\n\
         <style>{STYLE}</style>\n\
         <rect class=\"page\" x=\".5\" y=\".5\" width=\"{}\" height=\"{}\" rx=\"6\"/>\n\
         <text class=\"title\" x=\"20\" y=\"32\">One Pod, stopped in seven ways while requests of 9 s are in flight</text>\n",
        WIDTH - 1.0,
        height - 1.0
    );
    let words =
        "40 requests a second, each takes 9 s and has its mark where it began; the listener closes after 2 s";
    text(&mut svg, "small", 20.0, 52.0, "start", words);
    let mut second = 0.0;
    while second <= end {
        let at = x(second);
        let class = if second == 0.0 { "zero" } else { "grid" };
        let label = if second == 0.0 { "stop".to_owned() } else { format!("{second} s") };
        line(&mut svg, class, at, TOP - 8.0, bottom);
        text(&mut svg, "small", at, bottom + 18.0, "middle", &label);
        second += if end > 12.0 { 2.0 } else { 1.0 };
    }
    for (number, seen) in (0u32..).zip(seen) {
        row(&mut svg, TOP + f64::from(number) * ROW, &x, begin, seen);
    }
    legend(&mut svg, bottom + 52.0);
    svg + "</svg>\n"
}

fn row(svg: &mut String, top: f64, x: &impl Fn(f64) -> f64, begin: f64, seen: &Seen) {
    let application = top + STRIP + 4.0;
    let proxy = application + BAR + 4.0;
    text(svg, "name", 20.0, proxy + 2.0, "start", seen.name);
    bar(svg, "serving", x(begin), x(seen.closed), application);
    bar(svg, "finishing", x(seen.closed), x(seen.application), application);
    bar(svg, "proxy", x(begin), x(seen.proxy), proxy);
    for (at, lost) in &seen.requests {
        line(svg, if *lost { "lost" } else { "answered" }, x(*at), top, top + STRIP);
    }
    let (at, made) = seen.last_call;
    call(svg, x(at), application + BAR / 2.0, made);
    let lost = format!("{} of {} lost", seen.lost(), seen.requests.len());
    let class = if seen.lost() == 0 { "made" } else { "missed" };
    text(svg, class, RIGHT + 16.0, application + 9.0, "start", &lost);
    let (class, word) = if made { ("made", "last call made") } else { ("missed", "last call lost") };
    text(svg, class, RIGHT + 16.0, application + 26.0, "start", word);
    let after = seen.proxy - seen.application;
    let side = if after > 0.0 { "after" } else { "before" };
    text(
        svg,
        "small",
        RIGHT + 16.0,
        application + 42.0,
        "start",
        &format!("proxy ended {:.1} s {side}", after.abs()),
    );
}

fn legend(svg: &mut String, y: f64) {
    let mut x = 20.0;
    for (class, word, width) in [
        ("serving", "application serving", 175.0),
        ("finishing", "finishing requests", 170.0),
        ("proxy", "proxy up", 110.0),
    ] {
        bar(svg, class, x, x + 22.0, y - 12.0);
        text(svg, "", x + 30.0, y + 1.0, "start", word);
        x += width;
    }
    for (class, word, width) in [("answered", "answered", 94.0), ("lost", "request lost", 128.0)] {
        for offset in [0.0, 4.0, 8.0] {
            line(svg, class, x + offset, y - 10.0, y - 10.0 + STRIP);
        }
        text(svg, "", x + 16.0, y + 1.0, "start", word);
        x += width;
    }
    call(svg, x - 12.0, y - 4.0, true);
    text(svg, "", x, y + 1.0, "start", "last call made");
    call(svg, x + 114.0, y - 4.0, false);
    text(svg, "", x + 126.0, y + 1.0, "start", "lost");
}

fn bar(svg: &mut String, class: &str, from: f64, to: f64, y: f64) {
    let width = (to - from).max(0.0);
    writeln!(
        svg,
        "<rect class=\"{class}\" x=\"{from:.1}\" y=\"{y}\" width=\"{width:.1}\" height=\"{BAR}\"/>"
    )
    .unwrap();
}

fn line(svg: &mut String, class: &str, x: f64, from: f64, to: f64) {
    writeln!(svg, "<path class=\"{class}\" d=\"M{x:.1} {from}V{to}\"/>").unwrap();
}

fn text(svg: &mut String, class: &str, x: f64, y: f64, anchor: &str, words: &str) {
    writeln!(svg, "<text class=\"{class}\" x=\"{x:.1}\" y=\"{y}\" text-anchor=\"{anchor}\">{words}</text>")
        .unwrap();
}

/// The last call: a full circle, or a cross.
fn call(svg: &mut String, x: f64, y: f64, made: bool) {
    if made {
        writeln!(svg, "<circle class=\"made\" cx=\"{x:.1}\" cy=\"{y}\" r=\"5\" stroke=\"#fff\"/>").unwrap();
    } else {
        let (a, b) = (x - 5.0, y - 5.0);
        writeln!(svg, "<path class=\"cross\" d=\"M{a:.1} {b}l10 10m0 -10l-10 10\"/>").unwrap();
    }
}
