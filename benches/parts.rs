//! The parts of a look that are outlast's own: the parsers, and the owner look-up of the observer over a made-up kernel.

use divan::counter::ItemsCount;
use divan::{Bencher, black_box};
use outlast::pod::kernel::{Kernel, Scope, Visible};
use outlast::pod::owners::{Kinds, Rules};
use outlast::pod::proc_net::{parse_row, read_table};
use outlast::pod::snapshot::Observer;
use outlast::pod::sock_diag::parse_message;
use outlast::pod::{Row, State};
use std::io;
use std::net::SocketAddr;
use std::ops::ControlFlow;
use std::time::Duration;

const HEADER: &[u8] =
    b"  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n";
const V4: &[u8] = b"   1: 0A00000A:1F90 0200000A:D431 01 0016BCD0:00000000 01:00000014 00000000  1000        0 12346 4 0000000000000000 20 4 30 10 -1\n";
const V6: &[u8] = b"   0: 00000000000000000000000001000000:3A98 0000000000000000FFFF00000100007F:1F90 08 00000000:0000000A 00:00000000 00000000  1337        0 7 1 0 20 0\n";

fn main() {
    divan::main();
}

#[divan::bench(args = ["v4", "v6"])]
fn row_of_proc(bencher: Bencher, family: &str) {
    let line = if family == "v4" { V4 } else { V6 };
    bencher.bench(|| parse_row(black_box(line)));
}

#[divan::bench]
fn message_of_sock_diag(bencher: Bencher) {
    let mut message = [0_u8; 72];
    // AF_INET, ESTABLISHED.
    (message[0], message[1]) = (2, 1);
    bencher.bench(|| parse_message(black_box(&message)));
}

#[divan::bench(args = [200, 9_000])]
fn table_of_proc(bencher: Bencher, rows: usize) {
    let table = [HEADER, &V4.repeat(rows)].concat();
    let mut buffer = Vec::new();
    bencher.counter(ItemsCount::new(rows)).bench_local(|| {
        read_table(&table[..], 4096, &mut buffer, |row| {
            black_box(row);
            ControlFlow::<()>::Continue(())
        })
        .is_ok()
    });
}

/// A Pod in which every other connection is Envoy's.
struct Made(Vec<Row>);

impl Kernel for Made {
    fn rows(&mut self, _: Scope, each: &mut dyn FnMut(Row)) -> io::Result<()> {
        self.0.iter().copied().for_each(each);
        Ok(())
    }
    fn find(&mut self, _: &Row) -> Option<io::Result<Option<Row>>> {
        None
    }
    fn first_there(&mut self, _: &[Row]) -> io::Result<Option<Row>> {
        Ok(None)
    }
    fn processes(&mut self) -> io::Result<Vec<Visible>> {
        Ok(vec![Visible { pid: 7, parent: 1, name: "envoy".into() }])
    }
    fn lives(&mut self, _: &Visible) -> bool {
        true
    }
    fn sockets_of(&mut self, pid: i32, each: &mut dyn FnMut(u64) -> ControlFlow<()>) -> io::Result<()> {
        let envoys = self.0.iter().map(|row| row.inode).filter(|inode| pid == 7 && inode % 2 == 0);
        let _ = envoys.into_iter().try_for_each(each);
        Ok(())
    }
    fn effective_uid(&mut self, _: i32) -> io::Result<u32> {
        Ok(1337)
    }
    fn control_groups(&mut self, _: i32) -> Option<String> {
        None
    }
}

fn observer(connections: u16) -> Observer<Made> {
    let row = |number: u16| Row {
        local: SocketAddr::from(([10, 0, 0, 1], 15006)),
        remote: SocketAddr::from(([10, 0, 0, 2], number)),
        state: State::Established,
        send_queue: 0,
        receive_queue: 0,
        uid: 1000,
        inode: u64::from(number),
    };
    let rules = Rules {
        hold: Kinds { listeners: true, connections: true, undelivered: true },
        proxy: vec!["envoy".into()],
        ignore_ports: Vec::new(),
        ignore_uids: Vec::new(),
    };
    Observer::new(Made((1..=connections).map(row).collect()), rules, None)
}

/// Whose the sockets are is not known yet.
#[divan::bench(args = [200, 9_000])]
fn first_look(bencher: Bencher, connections: u16) {
    bencher
        .counter(ItemsCount::new(connections))
        .with_inputs(|| observer(connections))
        .bench_local_values(|mut observer| observer.look_at_all(Duration::ZERO).sight());
}

/// All owners are known.
#[divan::bench(args = [200, 9_000])]
fn later_look(bencher: Bencher, connections: u16) {
    let mut observer = observer(connections);
    for _ in 0..3 {
        observer.look_at_all(Duration::ZERO);
    }
    bencher
        .counter(ItemsCount::new(connections))
        .bench_local(|| observer.look_at_all(Duration::ZERO).sight());
}
