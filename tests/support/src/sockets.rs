//! Sockets in every state that TCP has, each with what keeps it there. All on loopback.

use nix::sys::resource::{Resource, getrlimit, setrlimit};
use socket2::{Domain, Protocol, Socket, Type};
use std::io::{self, Read, Write};
use std::net::{Ipv4Addr, Ipv6Addr, Shutdown, SocketAddr};
use std::os::fd::AsRawFd;
use std::str::FromStr;

/// How the addresses of a socket are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Family {
    V4,
    V6,
    /// v4 in a v6 socket: its listener is a dual-stack one.
    Mapped,
}

/// What a socket is to be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shape {
    Listener,
    /// Established, and nobody has accepted it: no process has it.
    Unaccepted,
    Established,
    /// The peer never answers.
    SynSent,
    SynRecv,
    /// Bytes and the FIN are stuck behind a peer's window of zero.
    FinWait1,
    FinWait2,
    /// As `FinWait1`, and the peer's FIN has come.
    Closing,
    CloseWait,
    /// As `CloseWait`, with bytes and a FIN that are stuck.
    LastAck,
    TimeWait,
    /// The same without a process.
    OrphanFinWait1,
    OrphanFinWait2,
    OrphanLastAck,
}

impl Family {
    pub const ALL: [Self; 3] = [Self::V4, Self::V6, Self::Mapped];
}

impl Shape {
    pub const ALL: [Self; 14] = [
        Self::Listener,
        Self::Unaccepted,
        Self::Established,
        Self::SynSent,
        Self::SynRecv,
        Self::FinWait1,
        Self::FinWait2,
        Self::Closing,
        Self::CloseWait,
        Self::LastAck,
        Self::TimeWait,
        Self::OrphanFinWait1,
        Self::OrphanFinWait2,
        Self::OrphanLastAck,
    ];
}

/// `FinWait1/V6`, as Debug writes both.
impl FromStr for Spec {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> anyhow::Result<Self> {
        let (shape, family) = text.split_once('/').unwrap_or((text, "V4"));
        let shape = Shape::ALL.into_iter().find(|known| format!("{known:?}") == shape);
        let family = Family::ALL.into_iter().find(|known| format!("{known:?}") == family);
        shape
            .zip(family)
            .map(|(shape, family)| Self { shape, family })
            .ok_or_else(|| anyhow::anyhow!("{text}"))
    }
}

/// A shape in a family.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Spec {
    pub shape: Shape,
    pub family: Family,
}

/// A socket that was made, and what it needs.
#[derive(Debug)]
pub struct Made {
    pub local: SocketAddr,
    /// A listener has none.
    pub remote: Option<SocketAddr>,
    /// Dropping these ends it. The socket itself is the first, where a process can have it.
    pub held: Vec<Socket>,
}

/// Binds and listens. A v6 wildcard is dual-stack.
pub fn listen(address: SocketAddr, backlog: i32) -> io::Result<Socket> {
    let socket = Socket::new(Domain::for_address(address), Type::STREAM, Some(Protocol::TCP))?;
    socket.set_reuse_address(true)?;
    // Inherited by what is accepted; small, so that a window of zero needs few bytes.
    socket.set_recv_buffer_size(4096)?;
    socket.set_send_buffer_size(4096)?;
    socket.bind(&address.into())?;
    socket.listen(backlog)?;
    Ok(socket)
}

/// A listener, and a connection from its client's end and from its server's.
struct Pair {
    client: Socket,
    server: Socket,
    listener: Socket,
}

fn address(socket: &Socket) -> SocketAddr {
    socket.local_addr().unwrap().as_socket().unwrap()
}

fn wildcard(family: Family) -> SocketAddr {
    match family {
        Family::V4 => (Ipv4Addr::LOCALHOST, 0).into(),
        Family::V6 => (Ipv6Addr::LOCALHOST, 0).into(),
        Family::Mapped => (Ipv6Addr::UNSPECIFIED, 0).into(),
    }
}

/// Connects to a listener from its own host.
fn connect(family: Family, listener: &Socket, wait: bool) -> io::Result<Socket> {
    let to: SocketAddr = match family {
        Family::Mapped => (Ipv4Addr::LOCALHOST.to_ipv6_mapped(), address(listener).port()).into(),
        Family::V4 | Family::V6 => address(listener),
    };
    let socket = Socket::new(Domain::for_address(to), Type::STREAM, Some(Protocol::TCP))?;
    socket.set_recv_buffer_size(4096)?;
    socket.set_send_buffer_size(4096)?;
    socket.set_nonblocking(!wait)?;
    match socket.connect(&to.into()) {
        Err(error) if !wait && error.raw_os_error() == Some(libc::EINPROGRESS) => {}
        done => done?,
    }
    socket.set_nonblocking(false)?;
    Ok(socket)
}

impl Pair {
    fn new(spec: Spec, backlog: i32) -> io::Result<Self> {
        let listener = listen(wildcard(spec.family), backlog)?;
        let client = connect(spec.family, &listener, true)?;
        let (server, _) = listener.accept()?;
        Ok(Self { client, server, listener })
    }

    fn client_is_it(self) -> Made {
        let remote = self.client.peer_addr().ok().and_then(|peer| peer.as_socket());
        Made { local: address(&self.client), remote, held: vec![self.client, self.server, self.listener] }
    }

    /// The client has closed its end.
    fn client_is_gone(self, local: SocketAddr) -> Made {
        let remote = self.server.local_addr().ok().and_then(|own| own.as_socket());
        Made { local, remote, held: vec![self.server, self.listener] }
    }
}

/// Writes until nothing more goes in: the peer does not read.
pub fn stuff(socket: &Socket) -> io::Result<()> {
    socket.set_nonblocking(true)?;
    loop {
        match (&*socket).write(&[0; 4096]) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
            done => done.map(drop)?,
        }
    }
    socket.set_nonblocking(false)
}

/// Reads until the peer's FIN.
fn drain(socket: &Socket) -> io::Result<()> {
    let mut bytes = [0; 4096];
    while (&*socket).read(&mut bytes)? > 0 {}
    Ok(())
}

/// Makes one.
pub fn make(spec: Spec) -> io::Result<Made> {
    use Shape::{
        CloseWait, Closing, FinWait1, FinWait2, LastAck, Listener, OrphanFinWait1, OrphanFinWait2,
        OrphanLastAck, SynRecv, SynSent, TimeWait, Unaccepted,
    };
    match spec.shape {
        Listener => {
            let wildcard = match spec.family {
                Family::V4 => (Ipv4Addr::UNSPECIFIED, 0).into(),
                family => wildcard(family),
            };
            let listener = listen(wildcard, 16)?;
            return Ok(Made { local: address(&listener), remote: None, held: vec![listener] });
        }
        SynSent => {
            // One connection fits a backlog of 0; the kernel drops what comes then.
            let listener = listen(wildcard(spec.family), 0)?;
            let first = connect(spec.family, &listener, true)?;
            let second = connect(spec.family, &listener, false)?;
            let remote = first.peer_addr()?.as_socket();
            return Ok(Made { local: address(&second), remote, held: vec![second, first, listener] });
        }
        Unaccepted | SynRecv => {
            let listener = listen(wildcard(spec.family), 16)?;
            if spec.shape == SynRecv {
                // The kernel waits for the first bytes before it makes a connection of it.
                let defer: libc::c_int = 60;
                // SAFETY: the descriptor is open, the pointer is to an int of the size that is given.
                let set = unsafe {
                    let (level, name) = (libc::IPPROTO_TCP, libc::TCP_DEFER_ACCEPT);
                    libc::setsockopt(listener.as_raw_fd(), level, name, (&raw const defer).cast(), 4)
                };
                nix::errno::Errno::result(set)?;
            }
            let client = connect(spec.family, &listener, true)?;
            let local = client.peer_addr()?.as_socket().unwrap();
            let remote = Some(address(&client));
            return Ok(Made { local, remote, held: vec![client, listener] });
        }
        _ => {}
    }
    let pair = Pair::new(spec, 16)?;
    let (client, server) = (&pair.client, &pair.server);
    let local = address(client);
    match spec.shape {
        FinWait1 | OrphanFinWait1 => stuff(client)?,
        Closing => {
            stuff(client)?;
            stuff(server)?;
        }
        LastAck | OrphanLastAck => {
            stuff(client)?;
            server.shutdown(Shutdown::Write)?;
            drain(client)?;
        }
        CloseWait => {
            server.shutdown(Shutdown::Write)?;
            drain(client)?;
        }
        _ => {}
    }
    match spec.shape {
        FinWait1 | FinWait2 | LastAck => client.shutdown(Shutdown::Write)?,
        Closing => {
            client.shutdown(Shutdown::Write)?;
            server.shutdown(Shutdown::Write)?;
            drain(client)?;
        }
        TimeWait => {
            client.shutdown(Shutdown::Write)?;
            drain(server)?;
            let Pair { client, server, listener } = pair;
            let remote = server.local_addr()?.as_socket();
            drop(server);
            drain(&client)?;
            return Ok(Made { local, remote, held: vec![listener] });
        }
        OrphanFinWait1 | OrphanFinWait2 | OrphanLastAck => return Ok(pair.client_is_gone(local)),
        _ => {}
    }
    Ok(pair.client_is_it())
}

/// Connections from this process to itself, both ends of each, and no listener.
pub fn connections(count: usize) -> io::Result<Vec<(Socket, Socket)>> {
    /// Fewer than a listener's port has ports for its clients.
    const OF_ONE_LISTENER: usize = 10_000;
    let (_, most) = getrlimit(Resource::RLIMIT_NOFILE)?;
    setrlimit(Resource::RLIMIT_NOFILE, most, most)?;
    let mut all = Vec::with_capacity(count);
    while all.len() < count {
        let listener = listen(wildcard(Family::V4), 16)?;
        for _ in 0..OF_ONE_LISTENER.min(count - all.len()) {
            all.push((connect(Family::V4, &listener, true)?, listener.accept()?.0));
        }
    }
    Ok(all)
}

/// A listener that speaks MPTCP.
pub fn listen_mptcp(address: SocketAddr) -> io::Result<Socket> {
    let socket = Socket::new(Domain::for_address(address), Type::STREAM, Some(Protocol::MPTCP))?;
    socket.bind(&address.into())?;
    socket.listen(16)?;
    Ok(socket)
}

/// A listener that shares its port with others of its kind.
pub fn listen_reuseport(address: SocketAddr) -> io::Result<Socket> {
    let socket = Socket::new(Domain::for_address(address), Type::STREAM, Some(Protocol::TCP))?;
    socket.set_reuse_port(true)?;
    socket.bind(&address.into())?;
    socket.listen(16)?;
    Ok(socket)
}
