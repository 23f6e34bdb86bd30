//! /proc/PID/status, which procfs parses for us: any bytes.
#![no_main]

use libfuzzer_sys::fuzz_target;
use procfs::FromBufRead;
use procfs::process::Status;

fuzz_target!(|file: &[u8]| {
    let _ = Status::from_buf_read(file);
});
