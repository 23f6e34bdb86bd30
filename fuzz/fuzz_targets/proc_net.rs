//! /proc/net/tcp and tcp6: any bytes. Where procfs understands a table, we understand it alike; where it is not the
//! kernel's, we may refuse what procfs takes (a sign before a number, a short field), but never read it otherwise.
#![no_main]

use std::net::SocketAddr;
use std::ops::ControlFlow;

use libfuzzer_sys::fuzz_target;
use outlast::pod::proc_net::{parse_row, read_table};

/// An independent reading of one row: split at white space, taken apart from the back.
fn simple(line: &str) -> Option<(SocketAddr, SocketAddr, u8, u64)> {
    let fields: Vec<&str> = line.split_ascii_whitespace().collect();
    let address = |field: &str| -> Option<SocketAddr> {
        let (ip, port) = field.rsplit_once(':')?;
        let words: Vec<u32> = (0..ip.len() / 8)
            .map(|n| u32::from_str_radix(&ip[n * 8..n * 8 + 8], 16).ok())
            .collect::<Option<_>>()?;
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_ne_bytes()).collect();
        let port = u16::from_str_radix(port, 16).ok()?;
        match bytes.len() {
            4 => Some((<[u8; 4]>::try_from(bytes).ok()?, port).into()),
            16 => Some((<[u8; 16]>::try_from(bytes).ok()?, port).into()),
            _ => None,
        }
    };
    let state = u8::from_str_radix(fields.get(3)?, 16).ok()?;
    Some((address(fields.get(1)?)?, address(fields.get(2)?)?, state, fields.get(9)?.parse().ok()?))
}

fuzz_target!(|table: &[u8]| {
    let mut rows = 0;
    let read = read_table(table, 4096, &mut Vec::new(), |_| {
        rows += 1;
        ControlFlow::<()>::Continue(())
    });
    let lines = table.iter().filter(|byte| **byte == b'\n').count();
    if read.is_ok() {
        // Every line is a row, but for the header.
        assert_eq!(rows + 1, lines);
    }
    for line in table.split_inclusive(|byte| *byte == b'\n') {
        if let Some(row) = parse_row(line) {
            let text = std::str::from_utf8(line).unwrap();
            assert_eq!(simple(text), Some((row.local, row.remote, row.state as u8, row.inode)));
        }
    }
});
