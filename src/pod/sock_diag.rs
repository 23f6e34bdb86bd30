//! Rows of the kernel's socket monitoring over netlink (`sock_diag(7)`, `net/ipv4/inet_diag.c`).
//!
//! It can be asked for listeners alone, and for one connection, at a cost that does not depend on how many connections
//! there are. It needs no privilege; a seccomp profile or gVisor may refuse it.

use std::io::{self, ErrorKind};
use std::mem::take;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsRawFd, OwnedFd};

use nix::libc;
use nix::sys::socket::{
    AddressFamily, MsgFlags, NetlinkAddr, SockFlag, SockProtocol, SockType, recvfrom, sendto, setsockopt,
    socket, sockopt,
};
use nix::sys::time::TimeVal;

use super::{Row, State};

/// The kernel fills at most so much at once (`netlink_recvmsg`).
const BUFFER: usize = 32 * 1024;
/// The kernel answers within the call. What imitates it may not, and must not stop us.
const PATIENCE_S: i64 = 1;
/// `SOCK_DIAG_BY_FAMILY` of `include/uapi/linux/sock_diag.h`.
const BY_FAMILY: u16 = 20;
/// Sizes of `struct nlmsghdr` and of `struct inet_diag_msg`.
const HEADER: usize = 16;
const MESSAGE: usize = 72;
/// And of the former with a `struct inet_diag_req_v2`.
const REQUEST: usize = 72;

/// Which sockets a dump is of: a bit for each of the kernel's states.
#[derive(Clone, Copy, Debug)]
pub struct States(u32);

impl States {
    /// Those that listen.
    pub const LISTENERS: States = States(1 << State::Listen as u32);
    /// All that /proc/net/tcp shows.
    pub const ALL: States = States((1 << 13) - 2);
    /// All but the two that are never more than a memory of a connection, and that may be very many.
    pub const THAT_MATTER: States = States(
        Self::ALL.0
            & !(1 << State::TimeWait as u32 | 1 << State::SynRecv as u32 | 1 << State::NewSynRecv as u32),
    );
}

/// A socket that asks the kernel about sockets.
#[derive(Debug)]
pub struct SockDiag {
    socket: OwnedFd,
    sequence: u32,
    buffer: Vec<u8>,
}

impl SockDiag {
    /// Opens it.
    ///
    /// # Errors
    /// The kernel has no such thing, or something refuses it.
    pub fn open() -> io::Result<SockDiag> {
        Ok(SockDiag { socket: open_socket()?, sequence: 0, buffer: vec![0; BUFFER] })
    }

    /// All sockets in these states, of one address family at a time: listeners first, as in /proc/net/tcp.
    ///
    /// # Errors
    /// The kernel refuses, does not answer, or answers what is not understood. Rows may have been given out before.
    pub fn dump(&mut self, states: States, each: &mut dyn FnMut(Row)) -> io::Result<()> {
        for family in [libc::AF_INET, libc::AF_INET6] {
            let request = Request { family, states, dump: true, row: None };
            self.ask(&request, each)?;
        }
        Ok(())
    }

    /// The socket that now has the addresses of `row`. After the end of a connection that may be a listener.
    ///
    /// # Errors
    /// As for a dump.
    pub fn find(&mut self, row: &Row) -> io::Result<Option<Row>> {
        let family = if row.local.is_ipv4() { libc::AF_INET } else { libc::AF_INET6 };
        let mut found = None;
        let request = Request { family, states: States::ALL, dump: false, row: Some(row) };
        match self.ask(&request, &mut |row| found = Some(row)) {
            Ok(()) => Ok(found),
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }

    fn ask(&mut self, request: &Request, each: &mut dyn FnMut(Row)) -> io::Result<()> {
        let answer = self.ask_once(request, each);
        if answer.as_ref().is_err_and(|error| error.kind() != ErrorKind::NotFound) {
            // A dump that was not read to its end would be in the way of the next.
            self.socket = open_socket()?;
        }
        answer
    }

    fn ask_once(&mut self, request: &Request, each: &mut dyn FnMut(Row)) -> io::Result<()> {
        self.sequence = self.sequence.wrapping_add(1);
        let fd = self.socket.as_raw_fd();
        sendto(fd, &request.bytes(self.sequence), &NetlinkAddr::new(0, 0), MsgFlags::empty())?;
        loop {
            let (length, sender) = recvfrom::<NetlinkAddr>(fd, &mut self.buffer)?;
            // Whoever has CAP_NET_ADMIN in the Pod could send us a message; only the kernel has port 0.
            if sender.is_none_or(|sender| sender.pid() != 0) {
                continue;
            }
            let mut rest = self.buffer.get(..length).unwrap_or_default();
            while !rest.is_empty() {
                let message = Message::split(&mut rest).ok_or_else(not_understood)?;
                if message.sequence != self.sequence {
                    continue;
                }
                match i32::from(message.kind) {
                    libc::NLMSG_DONE | libc::NLMSG_ERROR => {
                        let error = message.payload.first_chunk().map_or(0, |code| i32::from_ne_bytes(*code));
                        return match error {
                            0 => Ok(()),
                            code => Err(io::Error::from_raw_os_error(code.saturating_neg())),
                        };
                    }
                    _ if message.kind == BY_FAMILY => {
                        each(parse_message(message.payload).ok_or_else(not_understood)?);
                        if !request.dump {
                            return Ok(());
                        }
                    }
                    _ => {}
                }
            }
        }
    }
}

fn open_socket() -> io::Result<OwnedFd> {
    let socket =
        socket(AddressFamily::Netlink, SockType::Raw, SockFlag::SOCK_CLOEXEC, SockProtocol::NetlinkSockDiag)?;
    setsockopt(&socket, sockopt::ReceiveTimeout, &TimeVal::new(PATIENCE_S, 0))?;
    Ok(socket)
}

fn not_understood() -> io::Error {
    io::Error::new(ErrorKind::InvalidData, "sock_diag: an answer that is not understood")
}

struct Request<'a> {
    family: i32,
    states: States,
    dump: bool,
    row: Option<&'a Row>,
}

impl Request<'_> {
    /// A `struct nlmsghdr` and a `struct inet_diag_req_v2`.
    fn bytes(&self, sequence: u32) -> [u8; REQUEST] {
        let flags = libc::NLM_F_REQUEST | if self.dump { libc::NLM_F_DUMP } else { 0 };
        let byte = |number: i32| u8::try_from(number).unwrap_or_default();
        let nowhere = SocketAddr::from(([0, 0, 0, 0], 0));
        let (local, remote) = self.row.map_or((nowhere, nowhere), |row| (row.local, row.remote));
        let octets = |address: SocketAddr| match address.ip() {
            IpAddr::V4(ip) => {
                u128::from_be_bytes(ip.to_ipv6_mapped().octets()).wrapping_shl(96).to_be_bytes()
            }
            IpAddr::V6(ip) => ip.octets(),
        };
        let mut bytes = [0; REQUEST];
        let mut rest = &mut bytes[..];
        let mut put = |field: &[u8]| {
            let (now, later) = take(&mut rest).split_at_mut_checked(field.len()).unwrap_or_default();
            now.copy_from_slice(field);
            rest = later;
        };
        put(&u32::try_from(REQUEST).unwrap_or_default().to_ne_bytes());
        put(&BY_FAMILY.to_ne_bytes());
        put(&u16::try_from(flags).unwrap_or_default().to_ne_bytes());
        put(&sequence.to_ne_bytes());
        // Our port: the kernel fills it in.
        put(&[0; 4]);
        // Family, protocol, no extensions, padding.
        put(&[byte(self.family), byte(libc::IPPROTO_TCP), 0, 0]);
        put(&self.states.0.to_ne_bytes());
        // struct inet_diag_sockid: ports and addresses in network order, any interface, any cookie.
        put(&local.port().to_be_bytes());
        put(&remote.port().to_be_bytes());
        put(&octets(local));
        put(&octets(remote));
        put(&[0; 4]);
        put(&[0xff; 8]);
        bytes
    }
}

struct Message<'a> {
    kind: u16,
    sequence: u32,
    payload: &'a [u8],
}

impl<'a> Message<'a> {
    /// Splits the first message off (`NLMSG_NEXT`).
    fn split(rest: &mut &'a [u8]) -> Option<Message<'a>> {
        let length = usize::try_from(u32::from_ne_bytes(*rest.first_chunk()?)).ok()?;
        let kind = u16::from_ne_bytes(*rest.get(4..)?.first_chunk()?);
        let sequence = u32::from_ne_bytes(*rest.get(8..)?.first_chunk()?);
        let payload = rest.get(HEADER..length)?;
        *rest = rest.get(length.checked_next_multiple_of(4)?..).unwrap_or_default();
        Some(Message { kind, sequence, payload })
    }
}

/// Reads a `struct inet_diag_msg` (`include/uapi/linux/inet_diag.h`). Attributes may follow it.
#[must_use]
pub fn parse_message(message: &[u8]) -> Option<Row> {
    let message: &[u8; MESSAGE] = message.first_chunk()?;
    let word = |at: usize| Some(u32::from_ne_bytes(*message.get(at..)?.first_chunk()?));
    let address = |port: usize, ip: usize| {
        let port = u16::from_be_bytes(*message.get(port..)?.first_chunk()?);
        let ip = match i32::from(*message.first()?) {
            libc::AF_INET => IpAddr::from(*message.get(ip..)?.first_chunk::<4>()?),
            libc::AF_INET6 => IpAddr::from(*message.get(ip..)?.first_chunk::<16>()?),
            _ => return None,
        };
        Some(SocketAddr::new(ip, port))
    };
    let state = State::from_number(*message.get(1)?)?;
    let (receive_queue, send_queue) = (word(56)?, word(60)?);
    // Of a listener this is how many connections may wait, which /proc/net/tcp does not tell.
    let send_queue = if state == State::Listen { 0 } else { send_queue };
    Some(Row {
        local: address(4, 8)?,
        remote: address(6, 24)?,
        state,
        send_queue,
        receive_queue,
        uid: word(64)?,
        inode: u64::from(word(68)?),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::net::{TcpListener, TcpStream};

    #[test]
    fn a_connection_is_found_by_its_addresses_until_it_ends() {
        for ip in ["127.0.0.1", "::1"] {
            let listener = TcpListener::bind((ip, 0)).unwrap();
            let client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
            let (local, remote) = (client.local_addr().unwrap(), client.peer_addr().unwrap());
            let mut diag = SockDiag::open().unwrap();
            let mut row = None;
            diag.dump(States::THAT_MATTER, &mut |found| {
                if (found.local, found.remote) == (local, remote) {
                    row = Some(found);
                }
            })
            .unwrap();
            let row = row.unwrap();
            assert_eq!(diag.find(&row).unwrap(), Some(row));
            let _server = listener.accept().unwrap();
            drop(client);
            // Half closed: no process has it, and nothing is found of a process.
            assert!(diag.find(&row).unwrap().is_none_or(|now| now.inode == 0));
        }
    }

    proptest! {
        #[test]
        fn no_message_ends_the_program(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
            let _ = parse_message(&bytes);
            let mut rest = &bytes[..];
            while let Some(message) = Message::split(&mut rest) {
                prop_assert!(message.payload.len() <= bytes.len());
                if message.payload.is_empty() && rest.len() == bytes.len() {
                    break;
                }
            }
        }
    }
}
