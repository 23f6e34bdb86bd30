//! Rows of /proc/net/tcp and /proc/net/tcp6 (`net/ipv4/tcp_ipv4.c`, `tcp4_seq_show`).

use std::io::{self, ErrorKind, Read};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::ops::ControlFlow;
use std::str::from_utf8;

use super::{Row, State};

/// The kernel's own rows have at most 180 bytes. A longer one is no row, and is not read to its end.
const LONGEST_ROW: usize = 1024;

/// Reads a table row by row, in pieces of `piece` bytes, until its end or until `each` breaks. `buffer` is only there to
/// be used again.
///
/// # Errors
/// The first thing that is no row, and whatever `read` fails with: a table that is not understood as a whole
/// says nothing about what is not there.
pub fn read_table<B>(
    mut table: impl Read,
    piece: usize,
    buffer: &mut Vec<u8>,
    mut each: impl FnMut(Row) -> ControlFlow<B>,
) -> io::Result<ControlFlow<B>> {
    buffer.clear();
    let mut header = true;
    loop {
        let mut rest = &buffer[..];
        while let Some(end) = rest.iter().position(|byte| *byte == b'\n') {
            let (line, tail) = rest.split_at_checked(end.saturating_add(1)).unwrap_or((rest, &[]));
            rest = tail;
            if header {
                if !line.trim_ascii_start().starts_with(b"sl ") {
                    return Err(odd("header", line));
                }
                header = false;
            } else if let enough @ ControlFlow::Break(_) =
                each(parse_row(line).ok_or_else(|| odd("row", line))?)
            {
                return Ok(enough);
            }
        }
        if rest.len() > LONGEST_ROW {
            return Err(odd("row", rest));
        }
        let done = buffer.len().saturating_sub(rest.len());
        buffer.drain(..done);
        let kept = buffer.len();
        buffer.resize(kept.saturating_add(piece), 0);
        let read = loop {
            match table.read(buffer.get_mut(kept..).unwrap_or_default()) {
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                result => break result?,
            }
        };
        buffer.truncate(kept.saturating_add(read));
        if read == 0 {
            return if kept == 0 && !header {
                Ok(ControlFlow::Continue(()))
            } else {
                Err(odd("end", buffer))
            };
        }
    }
}

fn odd(what: &str, line: &[u8]) -> io::Error {
    let start = line.get(..180).unwrap_or(line);
    io::Error::new(ErrorKind::InvalidData, format!("not a {what}: {:?}", String::from_utf8_lossy(start)))
}

/// Parses one line, its newline included.
#[must_use]
pub fn parse_row(line: &[u8]) -> Option<Row> {
    let line = from_utf8(line.strip_suffix(b"\n")?).ok()?;
    let mut fields = line.split_ascii_whitespace();
    let mut next = || fields.next();
    next()?.strip_suffix(':')?;
    let local = parse_address(next()?)?;
    let remote = parse_address(next()?)?;
    let state = State::from_number(hex(next()?, 2)?.try_into().ok()?)?;
    let (send_queue, receive_queue) = next()?.split_once(':')?;
    let (send_queue, receive_queue) = (hex(send_queue, 8)?, hex(receive_queue, 8)?);
    let (_timer, _retransmits) = (next()?, next()?);
    let uid = next()?.parse().ok()?;
    let _probes = next()?;
    let inode = next()?.parse().ok()?;
    // A request to connect shows its listener's, and sock_diag none.
    let uid = if matches!(state, State::SynRecv | State::NewSynRecv) { 0 } else { uid };
    Some(Row { local, remote, state, send_queue, receive_queue, uid, inode })
}

/// `0100007F:1F90`: each 32-bit word of the address as a number of this machine's byte order.
fn parse_address(text: &str) -> Option<SocketAddr> {
    let (ip, port) = text.split_once(':')?;
    let port = hex(port, 4)?.try_into().ok()?;
    let ip = match ip.len() {
        8 => IpAddr::from(Ipv4Addr::from(hex(ip, 8)?.to_ne_bytes())),
        32 => {
            let mut octets = [0; 16];
            for (index, word) in octets.chunks_exact_mut(4).enumerate() {
                let start = index.checked_mul(8)?;
                word.copy_from_slice(&hex(ip.get(start..)?.get(..8)?, 8)?.to_ne_bytes());
            }
            IpAddr::from(Ipv6Addr::from(octets))
        }
        _ => return None,
    };
    Some(SocketAddr::new(ip, port))
}

/// Exactly `digits` hexadecimal digits (`from_str_radix` alone would take a sign).
fn hex(text: &str, digits: usize) -> Option<u32> {
    let clean = text.len() == digits && text.bytes().all(|byte| byte.is_ascii_hexdigit());
    clean.then(|| u32::from_str_radix(text, 16).ok())?
}

#[cfg(test)]
mod tests {
    use super::*;
    use procfs::net::TcpNetEntries;
    use procfs::{FromBufReadSI, LocalSystemInfo};
    use proptest::prelude::*;

    const HEADER: &str =
        "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n";

    fn rows(table: &str) -> io::Result<Vec<Row>> {
        let mut rows = Vec::new();
        let mut in_pieces = Vec::new();
        let keep = |rows: &mut Vec<Row>, row| {
            rows.push(row);
            ControlFlow::<()>::Continue(())
        };
        let whole = read_table(table.as_bytes(), 4096, &mut Vec::new(), |row| keep(&mut rows, row));
        let pieces = read_table(table.as_bytes(), 100, &mut Vec::new(), |row| keep(&mut in_pieces, row));
        assert_eq!((whole.is_ok(), &rows), (pieces.is_ok(), &in_pieces));
        let _ = whole?;
        Ok(rows)
    }

    fn table() -> String {
        format!(
            "{HEADER}{:<149}\n{:<149}\n",
            "   0: 0100007F:1F90 00000000:0000 0A 00000000:00000003 00:00000000 00000000  1000        0 12345 1 0000000000000000 100 0 0 10 0",
            "   1: 0A00000A:1F90 0200000A:D431 01 0016BCD0:00000000 01:00000014 00000000  1000        0 12346 4 0000000000000000 20 4 30 10 -1",
        )
    }

    #[test]
    fn rows_of_the_kernel_are_read() {
        let rows = rows(&table()).unwrap();
        assert_eq!(rows[0].to_string(), "listener tcp 127.0.0.1:8080 uid 1000 inode 12345");
        assert_eq!(rows[0].receive_queue, 3);
        assert_eq!(
            rows[1].to_string(),
            "connection tcp 10.0.0.10:8080 to 10.0.0.2:54321 established send 1490128 receive 0 uid 1000 inode 12346"
        );
    }

    #[test]
    fn a_v6_row_is_read() {
        let row = "   0: 00000000000000000000000001000000:3A98 0000000000000000FFFF00000100007F:1F90 08 00000000:0000000A 00:00000000 00000000  1337        0 7 1 0 20 0\n";
        let row = parse_row(row.as_bytes()).unwrap();
        assert_eq!(row.local, "[::1]:15000".parse().unwrap());
        assert_eq!(row.remote, "[::ffff:127.0.0.1]:8080".parse().unwrap());
        assert!(super::super::is_loopback(row.remote.ip()));
        assert_eq!((row.state, row.receive_queue), (State::CloseWait, 10));
    }

    #[test]
    fn reading_stops_when_told_to() {
        let mut count = 0;
        let read = read_table(table().as_bytes(), 4096, &mut Vec::new(), |_| {
            count += 1;
            ControlFlow::Break(())
        });
        assert_eq!((read.is_ok(), count), (true, 1));
    }

    #[test]
    fn what_is_not_understood_is_an_error_and_not_an_empty_table() {
        let good = table();
        assert!(rows("").is_err());
        assert!(rows("nonsense\n").is_err());
        assert!(rows(&good[..good.len() - 1]).is_err(), "a row cut short");
        assert!(rows(&good.replace(" 0A ", " 0D ")).is_err(), "a state that does not exist");
        assert!(rows(&good.replace("12345", "1234x")).is_err());
        assert!(rows(&good.replace("1F90", "+F90")).is_err());
        let endless = rows(&format!("{HEADER}{}", "7".repeat(1 << 20))).unwrap_err().to_string();
        assert!(endless.len() < 300, "{endless}");
    }

    #[test]
    fn the_tables_of_this_machine_agree_with_procfs() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let table = std::fs::read_to_string("/proc/net/tcp").unwrap();
        assert!(
            rows(&table).unwrap().iter().any(|row| Ok(row.local) == listener.local_addr().map_err(|_| ()))
        );
        agrees(&table).unwrap();
    }

    /// procfs' own parser is the oracle.
    fn agrees(table: &str) -> Result<(), TestCaseError> {
        let theirs = TcpNetEntries::from_buf_read(table.as_bytes(), &LocalSystemInfo).unwrap().0;
        let ours = rows(table).unwrap();
        prop_assert_eq!(ours.len(), theirs.len());
        for (ours, theirs) in ours.iter().zip(theirs) {
            prop_assert_eq!(ours.local, theirs.local_address);
            prop_assert_eq!(ours.remote, theirs.remote_address);
            prop_assert_eq!(ours.state as u8, theirs.state.to_u8());
            prop_assert_eq!((ours.send_queue, ours.receive_queue), (theirs.tx_queue, theirs.rx_queue));
            let uid = if matches!(ours.state, State::SynRecv | State::NewSynRecv) { 0 } else { theirs.uid };
            prop_assert_eq!((ours.uid, ours.inode), (uid, theirs.inode));
        }
        Ok(())
    }

    proptest! {
        #[test]
        fn any_row_agrees_with_procfs(
            v6: bool, ips in [any::<[u32; 4]>(), any::<[u32; 4]>()], ports: [u16; 2], state in 1u8..=12,
            queues: [u32; 2], uid: u32, inode: u64,
        ) {
            let address = |index: usize| {
                let words = if v6 { &ips[index][..] } else { &ips[index][..1] };
                let ip: Vec<_> = words.iter().map(|word| format!("{word:08X}")).collect();
                format!("{}:{:04X}", ip.concat(), ports[index])
            };
            agrees(&format!(
                "{HEADER}   0: {} {} {state:02X} {:08X}:{:08X} 02:000A5B3C 00000000 {uid:5}        0 {inode} 2 00000000 20\n",
                address(0), address(1), queues[0], queues[1],
            ))?;
        }

        #[test]
        fn no_line_ends_the_program(line in proptest::collection::vec(any::<u8>(), 0..200)) {
            let _ = parse_row(&line);
            let _ = read_table(&line[..], 4096, &mut Vec::new(), |_| ControlFlow::<()>::Continue(()));
        }
    }
}
