//! A process that has sockets and does nothing with them: `sockets [--undumpable] [--make SHAPE/FAMILY]…
//! [--listen ADDRESS]… [--mptcp ADDRESS]… [--connect ADDRESS]… [--stuff ADDRESS]… [--connections COUNT] [-- COMMAND…]`.
//!
//! `--stuff` connects and writes until nothing more goes in. `--connections` makes so many to itself, two sockets each. COMMAND is started as a child without any of the
//! sockets. It says `ready` on stderr and waits to be killed; copies of it have whatever name a test wants.

use anyhow::Result;
use lexopt::{Arg, ValueExt};
use pod::sockets::{connections, listen, listen_mptcp, make, stuff};
use socket2::{Domain, Socket, Type};
use std::net::SocketAddr;
use std::process::Command;

fn main() -> Result<()> {
    let mut kept = Vec::new();
    let mut child = Vec::new();
    let mut parser = lexopt::Parser::from_env();
    while let Some(arg) = parser.next()? {
        match arg {
            Arg::Long("undumpable") => nix::sys::prctl::set_dumpable(false)?,
            Arg::Long("make") => kept.extend(make(parser.value()?.parse()?)?.held),
            Arg::Long("listen") => kept.push(listen(parser.value()?.parse()?, 16)?),
            Arg::Long("mptcp") => kept.push(listen_mptcp(parser.value()?.parse()?)?),
            Arg::Long("connect") => kept.push(connect(parser.value()?.parse()?)?),
            Arg::Long("stuff") => {
                let socket = connect(parser.value()?.parse()?)?;
                stuff(&socket)?;
                kept.push(socket);
            }
            Arg::Long("connections") => {
                for (client, server) in connections(parser.value()?.parse()?)? {
                    kept.extend([client, server]);
                }
            }
            Arg::Value(program) => child = std::iter::once(program).chain(parser.raw_args()?).collect(),
            _ => return Err(arg.unexpected().into()),
        }
    }
    if let Some((program, arguments)) = child.split_first() {
        Command::new(program).args(arguments).spawn()?;
    }
    eprintln!("ready");
    loop {
        nix::unistd::pause();
    }
}

fn connect(address: SocketAddr) -> Result<Socket> {
    let socket = Socket::new(Domain::for_address(address), Type::STREAM, None)?;
    socket.set_send_buffer_size(4096)?;
    socket.connect(&address.into())?;
    Ok(socket)
}
