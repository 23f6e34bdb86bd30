//! A netlink answer: any bytes. What is read as a message agrees with an independent reading of the fixed offsets.
#![no_main]

use libfuzzer_sys::fuzz_target;
use outlast::pod::State;
use outlast::pod::sock_diag::parse_message;

fuzz_target!(|message: &[u8]| {
    let row = parse_message(message);
    let readable = message.len() >= 72 && [2, 10].contains(&message[0]) && (1..=12).contains(&message[1]);
    assert_eq!(row.is_some(), readable);
    if let Some(row) = row {
        let be16 = |at: usize| u16::from(message[at]) << 8 | u16::from(message[at + 1]);
        let ne32 = |at: usize| u32::from_ne_bytes(message[at..at + 4].try_into().unwrap());
        assert_eq!((row.local.port(), row.remote.port()), (be16(4), be16(6)));
        assert_eq!(row.local.is_ipv4(), message[0] == 2);
        assert_eq!((row.uid, row.inode, row.receive_queue), (ne32(64), u64::from(ne32(68)), ne32(56)));
        assert_eq!(row.send_queue, if row.state == State::Listen { 0 } else { ne32(60) });
    }
});
