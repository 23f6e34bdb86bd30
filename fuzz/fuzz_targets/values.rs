//! Durations, booleans, ranges, names and URLs: any text.
#![no_main]

use libfuzzer_sys::fuzz_target;
use outlast::cli::values::{boolean, duration, names, ranges};
use outlast::proxy_api::Url;

/// An independent reading of a duration, in floating point: good to a relative 2^-40 of it.
fn simple(text: &str) -> Option<f64> {
    if text == "0" {
        return Some(0.0);
    }
    let mut total = 0.0;
    let mut rest = text;
    if rest.is_empty() {
        return None;
    }
    while !rest.is_empty() {
        let digits = rest.chars().take_while(|c| c.is_ascii_digit() || *c == '.').count();
        let number: f64 = rest[..digits].parse().ok()?;
        rest = &rest[digits..];
        let (unit, scale) =
            [("ns", 1e-9), ("us", 1e-6), ("µs", 1e-6), ("ms", 1e-3), ("s", 1.0), ("m", 60.0), ("h", 3600.0)]
                .into_iter()
                .find(|(unit, _)| {
                    rest.starts_with(unit) && !rest[unit.len()..].starts_with(char::is_alphabetic)
                })?;
        rest = &rest[unit.len()..];
        total += number * scale;
    }
    Some(total)
}

fuzz_target!(|text: &str| {
    match (duration(text), simple(text)) {
        (Ok(read), expected) => {
            let expected = expected.expect(text);
            let error = (read.as_secs_f64() - expected).abs();
            // Each part is rounded down to a nanosecond.
            assert!(error <= expected * 1e-12 + text.len() as f64 * 1e-9, "{text}: {read:?}, {expected}");
        }
        (Err(_), Some(expected)) => assert!(expected > 9.2e9, "{text}"),
        (Err(expected), None) => assert!(expected.len() < 200),
    }
    let _ = (boolean(text), names(text));
    if let Ok(ranges) = ranges::<u16>(text, "ports") {
        assert!(ranges.iter().all(|range| range.start() <= range.end()));
        assert_eq!(ranges.len(), text.split(',').count());
    }
    let _ = ranges::<u32>(text, "uids");
    if let Ok(url) = Url::parse(text) {
        let shown = url.to_string();
        assert!(
            ["http://127.0.0.1", "http://[::1]", "http://localhost"].iter().any(|host| {
                shown
                    .to_ascii_lowercase()
                    .strip_prefix(host)
                    .is_some_and(|rest| rest.is_empty() || rest.starts_with([':', '/', '?']))
            }),
            "{shown}"
        );
    }
});
