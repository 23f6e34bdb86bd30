//! What the kernel shows of the Pod: rows of sockets, the processes that hold them, and who owns what.

pub mod kernel;
pub mod owners;
pub mod proc_net;
pub mod snapshot;
pub mod sock_diag;

use std::fmt;
use std::net::{IpAddr, SocketAddr};

/// State of a TCP socket, with the kernel's numbers (`include/net/tcp_states.h`).
///
/// | state | inode | counts as |
/// |---|---|---|
/// | LISTEN | always | a listener: new work can still come |
/// | ESTABLISHED | of the holder | a connection: requests may be in flight. Inode 0 before `accept`: the listener stands for it |
/// | `SYN_SENT` | always | a connection: the process is about to send |
/// | `CLOSE_WAIT` | of the holder | a connection: the peer has said all, the process may still answer |
/// | `FIN_WAIT1`, `FIN_WAIT2`, CLOSING, `LAST_ACK` | while a process holds it | a connection: half-closed, answers may still come |
/// | the same | 0: the process has closed it | nothing, unless unsent bytes are left: undelivered |
/// | `TIME_WAIT`, `SYN_RECV` | 0 | nothing: no process has it, no byte is left |
/// | CLOSE | of the holder | a connection: reset or not yet connected, but a process still has it |
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[allow(missing_docs, reason = "the kernel's names")]
pub enum State {
    Established = 1,
    SynSent = 2,
    SynRecv = 3,
    FinWait1 = 4,
    FinWait2 = 5,
    TimeWait = 6,
    Close = 7,
    CloseWait = 8,
    LastAck = 9,
    Listen = 10,
    Closing = 11,
    NewSynRecv = 12,
}

impl State {
    /// The state with the kernel's number.
    #[must_use]
    pub fn from_number(number: u8) -> Option<State> {
        use State::{
            Close, CloseWait, Closing, Established, FinWait1, FinWait2, LastAck, Listen, NewSynRecv, SynRecv,
            SynSent, TimeWait,
        };
        const ALL: [State; 12] = [
            Established,
            SynSent,
            SynRecv,
            FinWait1,
            FinWait2,
            TimeWait,
            Close,
            CloseWait,
            LastAck,
            Listen,
            Closing,
            NewSynRecv,
        ];
        ALL.get(usize::from(number.checked_sub(1)?)).copied()
    }
}

impl fmt::Display for State {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            State::Established => "established",
            State::SynSent => "syn-sent",
            State::SynRecv | State::NewSynRecv => "syn-recv",
            State::FinWait1 => "fin-wait-1",
            State::FinWait2 => "fin-wait-2",
            State::TimeWait => "time-wait",
            State::Close => "close",
            State::CloseWait => "close-wait",
            State::LastAck => "last-ack",
            State::Listen => "listen",
            State::Closing => "closing",
        })
    }
}

/// One TCP socket of the Pod's network namespace.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Row {
    /// Local address. A dual-stack listener is `[::]`; a v4 peer of it is v4-mapped.
    pub local: SocketAddr,
    /// Remote address; unspecified for a listener.
    pub remote: SocketAddr,
    /// State.
    pub state: State,
    /// Bytes not yet acknowledged by the peer, a FIN counted as one; for a listener the backlog.
    pub send_queue: u32,
    /// Bytes that the process has not read; for a listener the connections it has not accepted.
    pub receive_queue: u32,
    /// Uid that the socket was made with; 0 also where there is no process.
    pub uid: u32,
    /// Inode of the socket; 0 where no process holds it.
    pub inode: u64,
}

impl Row {
    /// `tcp` or `tcp6`, as netstat calls the two tables.
    #[must_use]
    pub fn protocol(&self) -> &'static str {
        if self.local.is_ipv4() { "tcp" } else { "tcp6" }
    }

    /// Whether both are one socket, whatever has become of it: an inode alone may be another's by now.
    #[must_use]
    pub fn is_socket_of(&self, other: &Row) -> bool {
        let key = |row: &Row| (row.inode, row.local, row.remote);
        key(self) == key(other)
    }

    /// Whether it is a listener.
    #[must_use]
    pub fn listens(&self) -> bool {
        self.state == State::Listen
    }
}

/// `listener tcp 0.0.0.0:8080 uid 1000 inode 123`, or a connection with its peer, state and queues.
impl fmt::Display for Row {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let protocol = self.protocol();
        if self.listens() {
            return write!(f, "listener {protocol} {} uid {} inode {}", self.local, self.uid, self.inode);
        }
        write!(f, "connection {protocol} {} to {} {}", self.local, self.remote, self.state)?;
        if self.send_queue != 0 || self.receive_queue != 0 {
            write!(f, " send {} receive {}", self.send_queue, self.receive_queue)?;
        }
        write!(f, " uid {} inode {}", self.uid, self.inode)
    }
}

/// Whether an address is of this host alone; v4-mapped ones included.
fn is_loopback(ip: IpAddr) -> bool {
    ip.to_canonical().is_loopback()
}
