//! /proc/PID/stat and, parsed by procfs, /proc/PID/status: any bytes. An independent reading of stat takes it apart from
//! the back and agrees.
#![no_main]

use libfuzzer_sys::fuzz_target;
use outlast::pod::kernel::{Stat, parse_stat};
use procfs::FromBufRead;
use procfs::process::Status;

fn simple(file: &[u8]) -> Option<Stat<'_>> {
    let after = file.len() - file.rsplit(|byte| *byte == b')').next()?.len();
    let before = file.split(|byte| *byte == b'(').next()?.len() + 1;
    let name = file.get(before..after.checked_sub(1)?)?;
    let pid = String::from_utf8(file[..before - 1].to_vec()).ok()?.trim().parse().ok()?;
    let rest = String::from_utf8(file[after..].to_vec()).ok()?;
    let mut words = rest.split(|c: char| c.is_ascii_whitespace()).filter(|word| !word.is_empty());
    let (state, parent) = (words.next()?, words.next()?.parse().ok()?);
    Some(Stat { pid, name, alive: !["Z", "X", "x"].contains(&state), parent })
}

fuzz_target!(|file: &[u8]| {
    assert_eq!(parse_stat(file), simple(file));
    let _ = Status::from_buf_read(file);
});
