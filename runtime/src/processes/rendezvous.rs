//! The processes of a run find each other: all call process 0, which checks that they are of one
//! run and tells each where the others listen; then each calls those before it.

use super::handshake::{self, HandshakeError, Token};
use super::lines::{Connection, Processes};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::io::{self, ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Longest that a connection takes to say who it is.
const INTRODUCTION: Duration = Duration::from_secs(5);
/// Connections that may be at that at the same time; more are closed.
const MOST_STRANGERS: usize = 256;
/// Connections that are accepted before anything else is looked at.
const MOST_AT_ONCE: usize = 64;
/// Others that a process calls at the same time.
const MOST_CALLS: usize = 32;
/// Longest word of the rendezvous, in bytes.
const LONGEST_WORD: u32 = 1 << 22;
/// How often is looked for what may have come.
const LOOK: Duration = Duration::from_millis(5);

/// Which process of a run, of how many.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Place {
    /// Its number, from 0, which coordinates.
    pub index: usize,
    /// How many there are.
    pub of: usize,
}

/// Facts that must be the same in all processes of a run, by name.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Fingerprint(pub BTreeMap<String, String>);

impl Fingerprint {
    /// The first fact that differs: its name, and what it is here and there.
    pub(super) fn difference(&self, other: &Fingerprint) -> Option<(String, [String; 2])> {
        let none = String::from("missing");
        let names = self.0.keys().chain(other.0.keys());
        names.into_iter().find_map(|name| {
            let [mine, theirs] = [self, other].map(|f| f.0.get(name).unwrap_or(&none).clone());
            (mine != theirs).then(|| (name.clone(), [mine, theirs]))
        })
    }
}

/// Why processes do not come together.
#[derive(Debug, thiserror::Error)]
pub enum JoinError {
    /// An address cannot be listened at.
    #[error("cannot listen at {address}: {source}")]
    Listen {
        /// The address.
        address: String,
        /// Why.
        source: io::Error,
    },
    /// Process 0 is not there.
    #[error("process {} of {} cannot reach process 0 {at}in {seconds} s: {problem}", place.index, place.of)]
    Unreachable {
        /// This process.
        place: Place,
        /// `at <address> `, where that is known.
        at: String,
        /// How long it was tried.
        seconds: u64,
        /// The last problem.
        problem: String,
    },
    /// Process 0 has another token, as it always will.
    #[error("process {} of {} called process 0 {at}in vain: its token is another one", place.index, place.of)]
    Token {
        /// This process.
        place: Place,
        /// `at <address> `.
        at: String,
    },
    /// Some processes did not come.
    #[error("of {of} processes, {} did not join in {seconds} s", numbers(missing))]
    Missing {
        /// Their numbers.
        missing: Vec<usize>,
        /// How many there are.
        of: usize,
        /// How long they were waited for.
        seconds: u64,
    },
    /// Something that must be the same is not.
    #[error("{what} of process {index} is {theirs}, that of process 0 {ours}")]
    Differs {
        /// Its name.
        what: String,
        /// The process.
        index: usize,
        /// Its value there.
        theirs: String,
        /// Its value in process 0.
        ours: String,
    },
    /// Process 0 does not take this one in.
    #[error("process 0 does not let process {index} join: {reason}")]
    Refused {
        /// This process.
        index: usize,
        /// Why not.
        reason: String,
    },
    /// A process that was started ended before it joined.
    #[error("{0}")]
    Ended(String),
    /// Two processes cannot be connected.
    #[error("processes {from} and {to} cannot be connected: {problem}")]
    Apart {
        /// The one that calls.
        from: usize,
        /// The one that is called.
        to: usize,
        /// Why not.
        problem: String,
    },
}

fn numbers(all: &[usize]) -> String {
    let words: Vec<String> = all.iter().map(usize::to_string).collect();
    let noun = if all.len() == 1 {
        "process"
    } else {
        "processes"
    };
    format!("{noun} {}", words.join(", "))
}

/// Who a process is, for messages, and to count those of one host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Who {
    pub pid: u32,
    pub host: String,
}

impl Who {
    pub fn me() -> Self {
        Who {
            pid: std::process::id(),
            host: crate::record::host(),
        }
    }
}

/// The introduction of a process to process 0.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Hello {
    place: Place,
    fingerprint: Fingerprint,
    who: Who,
    pub listens: SocketAddr,
}

/// The answer.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum Reply {
    Welcome {
        run: String,
        /// By process, without the first.
        listen: Vec<SocketAddr>,
        all: Vec<Who>,
    },
    Refused(String),
}

/// The introduction of a process to another one that it calls.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Peer {
    pub index: usize,
    pub run: String,
}

pub(super) fn say(to: &mut impl Write, word: &impl Serialize) -> io::Result<()> {
    let bad = |e: rmp_serde::encode::Error| io::Error::new(ErrorKind::InvalidData, e.to_string());
    let mut packet = vec![0; 4];
    rmp_serde::encode::write_named(&mut packet, word).map_err(bad)?;
    let len = (packet.len() - 4) as u32;
    packet[..4].copy_from_slice(&len.to_le_bytes());
    to.write_all(&packet)
}

pub(super) fn hear<T: DeserializeOwned>(from: &mut impl Read) -> io::Result<T> {
    let bad = |what: String| io::Error::new(ErrorKind::InvalidData, what);
    let mut len = [0; 4];
    from.read_exact(&mut len)?;
    let len = u32::from_le_bytes(len);
    if len > LONGEST_WORD {
        return Err(bad(format!("a word of {len} bytes")));
    }
    let mut word = Vec::new();
    if from.take(u64::from(len)).read_to_end(&mut word)? != len as usize {
        return Err(ErrorKind::UnexpectedEof.into());
    }
    rmp_serde::from_slice(&word).map_err(|e| bad(e.to_string()))
}

/// Whether bytes are one of the words by which processes come together. For fuzzing.
pub(super) fn is_introduction(bytes: &[u8]) -> bool {
    hear::<Hello>(&mut &bytes[..]).is_ok()
        || hear::<Reply>(&mut &bytes[..]).is_ok()
        || hear::<Peer>(&mut &bytes[..]).is_ok()
}

/// One of each of these words.
pub(super) fn introductions() -> Vec<Vec<u8>> {
    let listens = SocketAddr::from(([10, 9, 0, 1], 29500));
    let hello = Hello {
        place: Place { index: 1, of: 3 },
        fingerprint: Fingerprint(BTreeMap::from([("plan".into(), "5e".into())])),
        who: Who::me(),
        listens,
    };
    let welcome = Reply::Welcome {
        run: "7".into(),
        listen: vec![listens; 2],
        all: vec![Who::me(); 3],
    };
    let peer = Peer {
        index: 2,
        run: "7".into(),
    };
    let mut words = vec![Vec::new(); 4];
    let said = say(&mut words[0], &hello)
        .and(say(&mut words[1], &welcome))
        .and(say(&mut words[2], &Reply::Refused("another plan".into())))
        .and(say(&mut words[3], &peer));
    said.map_or_else(|_| Vec::new(), |()| words)
}

/// Those who call a process and show that they know the token. Each says who it is on a thread of
/// its own, so that nobody can hold up the others.
struct Arrivals<T> {
    listener: TcpListener,
    token: Token,
    strangers: Arc<AtomicUsize>,
    tell: Sender<Arrival<T>>,
    come: Receiver<Arrival<T>>,
}

/// A connection, and who said to be at its other end.
type Arrival<T> = (TcpStream, T);

impl<T: DeserializeOwned + Send + 'static> Arrivals<T> {
    fn new(listener: TcpListener, token: Token) -> io::Result<Self> {
        listener.set_nonblocking(true)?;
        let (tell, come) = channel();
        Ok(Arrivals {
            listener,
            token,
            strangers: Arc::default(),
            tell,
            come,
        })
    }
    /// The next one who has come, if any.
    fn next(&mut self) -> Option<Arrival<T>> {
        for _ in 0..MOST_AT_ONCE {
            let Ok((stream, _)) = self.listener.accept() else {
                break;
            };
            if self.strangers.fetch_add(1, Ordering::Relaxed) >= MOST_STRANGERS {
                self.strangers.fetch_sub(1, Ordering::Relaxed);
                continue;
            }
            let (token, come) = (self.token.clone(), self.tell.clone());
            let strangers = Arc::clone(&self.strangers);
            std::thread::spawn(move || {
                // Whoever is none of us is of no interest.
                if let Ok(arrived) = introduced(stream, &token) {
                    let _ = come.send(arrived);
                }
                strangers.fetch_sub(1, Ordering::Relaxed);
            });
        }
        self.come.try_recv().ok()
    }
}

fn introduced<T: DeserializeOwned>(
    stream: TcpStream,
    token: &Token,
) -> Result<Arrival<T>, HandshakeError> {
    stream.set_nonblocking(false)?;
    let mut timed = Timed {
        stream: &stream,
        until: Instant::now() + INTRODUCTION,
    };
    handshake::answer(&mut timed, token)?;
    let word = hear(&mut timed)?;
    Ok((stream, word))
}

/// A connection until a moment, however slowly its bytes come.
struct Timed<'a> {
    stream: &'a TcpStream,
    until: Instant,
}

impl Timed<'_> {
    fn left(&self) -> io::Result<Option<Duration>> {
        let left = self.until.saturating_duration_since(Instant::now());
        match left.is_zero() {
            true => Err(ErrorKind::TimedOut.into()),
            false => Ok(Some(left)),
        }
    }
}

impl Read for Timed<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.stream.set_read_timeout(self.left()?)?;
        self.stream.read(buffer)
    }
}

impl Write for Timed<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.stream.set_write_timeout(self.left()?)?;
        self.stream.write(bytes)
    }
    fn flush(&mut self) -> io::Result<()> {
        self.stream.flush()
    }
}

/// Whether the other end of a connection, which says nothing now, has closed it.
fn has_ended(stream: &TcpStream) -> bool {
    let peeked = stream
        .set_nonblocking(true)
        .and_then(|()| stream.peek(&mut [0]));
    let restored = stream.set_nonblocking(false);
    match peeked {
        Ok(n) => n == 0,
        Err(e) => e.kind() != ErrorKind::WouldBlock || restored.is_err(),
    }
}

fn timed(stream: &TcpStream, limit: Option<Duration>) -> io::Result<()> {
    stream.set_read_timeout(limit)?;
    stream.set_write_timeout(limit)
}

/// Makes of a connection of the rendezvous one of the run.
fn settled(stream: &TcpStream) -> io::Result<()> {
    timed(stream, None)?;
    notices_loss(stream)?;
    stream.set_nodelay(true)
}

/// A host that vanishes without a word is noticed after a minute.
#[cfg(target_os = "linux")]
fn notices_loss(stream: &TcpStream) -> io::Result<()> {
    use rustix::net::sockopt;
    sockopt::set_socket_keepalive(stream, true)?;
    sockopt::set_tcp_keepidle(stream, Duration::from_secs(20))?;
    sockopt::set_tcp_keepintvl(stream, Duration::from_secs(10))?;
    sockopt::set_tcp_keepcnt(stream, 4)?;
    sockopt::set_tcp_user_timeout(stream, 60_000)?;
    Ok(())
}

#[cfg(not(target_os = "linux"))]
fn notices_loss(_: &TcpStream) -> io::Result<()> {
    Ok(())
}

/// Process 0 before the others have come.
#[derive(Debug)]
pub struct Host {
    listener: TcpListener,
    address: SocketAddr,
    token: Token,
}

impl Host {
    /// Listens at an address; port 0 takes a free one.
    pub fn open(bind: SocketAddr, token: Token) -> Result<Self, JoinError> {
        let listen = |source| JoinError::Listen {
            address: bind.to_string(),
            source,
        };
        let listener = TcpListener::bind(bind).map_err(listen)?;
        let address = listener.local_addr().map_err(listen)?;
        Ok(Host {
            listener,
            address,
            token,
        })
    }
    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }
    /// The secret of the run.
    pub fn token(&self) -> &Token {
        &self.token
    }

    /// Waits for the other processes. `watch` says why it is in vain, once it is.
    ///
    /// Fails when not all have come in time, or one of them is of another run: then all that have
    /// come are told.
    pub fn gather(
        self,
        of: usize,
        fingerprint: &Fingerprint,
        patience: Duration,
        watch: &mut dyn FnMut() -> Option<String>,
    ) -> Result<Processes, JoinError> {
        let began = Instant::now();
        let mut arrivals =
            Arrivals::<Hello>::new(self.listener, self.token.clone()).map_err(|source| {
                JoinError::Listen {
                    address: self.address.to_string(),
                    source,
                }
            })?;
        let mut come: BTreeMap<usize, (TcpStream, Hello)> = BTreeMap::new();
        let failure = loop {
            if come.len() + 1 >= of {
                break None;
            }
            match arrivals.next() {
                Some((stream, hello)) => {
                    if let Some(error) = take_in(&mut come, of, fingerprint, stream, hello) {
                        break Some(error);
                    }
                }
                None if let Some(why) = watch() => break Some(JoinError::Ended(why)),
                None if began.elapsed() > patience => {
                    let missing = (1..of).filter(|i| !come.contains_key(i)).collect();
                    let seconds = patience.as_secs();
                    break Some(JoinError::Missing {
                        missing,
                        of,
                        seconds,
                    });
                }
                None => {
                    // One that died after it came may be started again.
                    come.retain(|_, (stream, _)| !has_ended(stream));
                    std::thread::sleep(LOOK);
                }
            }
        };
        if let Some(error) = failure {
            for (stream, _) in come.values_mut() {
                let _ = say(stream, &Reply::Refused(error.to_string()));
            }
            return Err(error);
        }
        let run = Token::random().map_err(|e| JoinError::Ended(e.to_string()))?;
        let others = come.values().map(|(_, hello)| &hello.who);
        let all: Vec<Who> = [Who::me()].iter().chain(others).cloned().collect();
        let welcome = Reply::Welcome {
            run: run.reveal(),
            listen: come.values().map(|(_, hello)| hello.listens).collect(),
            all: all.clone(),
        };
        let mut streams = vec![None];
        for (index, (mut stream, _)) in come {
            let told = say(&mut stream, &welcome).and_then(|()| settled(&stream));
            told.map_err(|e| JoinError::Apart {
                from: index,
                to: 0,
                problem: e.to_string(),
            })?;
            streams.push(Some(stream));
        }
        Ok(Processes::new(
            Place { index: 0, of },
            all,
            connections(streams),
        ))
    }
}

/// Adds one who has come, unless it is one too many. Fails when it cannot be of this run.
fn take_in(
    come: &mut BTreeMap<usize, (TcpStream, Hello)>,
    of: usize,
    fingerprint: &Fingerprint,
    mut stream: TcpStream,
    hello: Hello,
) -> Option<JoinError> {
    let Place { index, of: theirs } = hello.place;
    let differs = match fingerprint.difference(&hello.fingerprint) {
        _ if theirs != of => Some((
            "the number of processes".into(),
            [of.to_string(), theirs.to_string()],
        )),
        difference => difference,
    };
    let refused = match differs {
        Some((what, [ours, theirs])) => {
            let error = JoinError::Differs {
                what,
                index,
                theirs,
                ours,
            };
            let _ = say(&mut stream, &Reply::Refused(error.to_string()));
            return Some(error);
        }
        None if !(1..of).contains(&index) => "there is no such process",
        None if come.contains_key(&index) => "another process has its number",
        None => {
            come.insert(index, (stream, hello));
            return None;
        }
    };
    let _ = say(&mut stream, &Reply::Refused(refused.into()));
    None
}

/// The way to process 0: its address and the token of the run.
pub enum Way<'a> {
    /// They stay as they are, so that a token that is refused once always is.
    Known(String, Token),
    /// They are looked up before each try; in place of them, what is in the way.
    LookedUp(&'a mut dyn FnMut() -> Result<(String, Token), String>),
}

/// Joins the run of a process 0, for which it waits as long as `patience` says, and then again for its
/// answer.
///
/// Fails when process 0 cannot be reached in time, does not take this one in, or another process
/// cannot be reached; at once only where the token is known and another one.
pub fn join(
    place: Place,
    fingerprint: &Fingerprint,
    patience: Duration,
    mut way: Way<'_>,
) -> Result<Processes, JoinError> {
    let until = Instant::now() + patience;
    let mut at = String::new();
    let (mut stream, token) = loop {
        let found = match &mut way {
            Way::Known(address, token) => Ok((address.clone(), token.clone())),
            Way::LookedUp(find) => find(),
        };
        let problem = match found {
            Err(problem) => problem,
            Ok((address, token)) => {
                at = format!("at {address} ");
                match call(&address, &token) {
                    Ok(stream) => break (stream, token),
                    Err(HandshakeError::Token) if matches!(way, Way::Known(..)) => {
                        return Err(JoinError::Token { place, at });
                    }
                    Err(e) => e.to_string(),
                }
            }
        };
        if Instant::now() >= until {
            return Err(JoinError::Unreachable {
                place,
                at,
                seconds: patience.as_secs(),
                problem,
            });
        }
        std::thread::sleep(10 * LOOK);
    };
    let apart = |from, to, e: &dyn std::fmt::Display| JoinError::Apart {
        from,
        to,
        problem: e.to_string(),
    };
    let to_first = |e: io::Error| apart(place.index, 0, &e);
    // The others reach this host on the way on which it reaches process 0.
    let own = SocketAddr::new(stream.local_addr().map_err(to_first)?.ip(), 0);
    let listen = |source| JoinError::Listen {
        address: own.to_string(),
        source,
    };
    let listener = TcpListener::bind(own).map_err(listen)?;
    let hello = Hello {
        place,
        fingerprint: fingerprint.clone(),
        who: Who::me(),
        listens: listener.local_addr().map_err(listen)?,
    };
    say(&mut stream, &hello).map_err(to_first)?;
    // Process 0 waits for the others as long as this one did for it.
    let wait = patience + INTRODUCTION;
    stream.set_read_timeout(Some(wait)).map_err(to_first)?;
    let reply = hear(&mut stream).map_err(|e| match e.kind() {
        ErrorKind::UnexpectedEof | ErrorKind::ConnectionReset => JoinError::Refused {
            index: place.index,
            reason: "it has ended".into(),
        },
        _ => apart(place.index, 0, &unanswered(e, "process 0", wait)),
    });
    let (run, addresses, all) = match reply? {
        Reply::Welcome { run, listen, all } => (run, listen, all),
        Reply::Refused(reason) => {
            return Err(JoinError::Refused {
                index: place.index,
                reason,
            });
        }
    };
    settled(&stream).map_err(to_first)?;
    let mut streams: Vec<Option<TcpStream>> = vec![Some(stream)];
    streams.resize_with(place.of, || None);
    let peer = Peer {
        index: place.index,
        run: run.clone(),
    };
    let mut before = addresses;
    before.truncate(place.index.saturating_sub(1));
    if before.len() + 1 < place.index {
        let unknown = "process 0 does not say where that one listens";
        return Err(apart(place.index, before.len() + 1, &unknown));
    }
    let until = Instant::now() + patience;
    let calls = Calls::begin(before, peer, (&token, until));
    let mut arrivals = Arrivals::<Peer>::new(listener, token).map_err(listen)?;
    while let Some(missing) = streams.iter().enumerate().position(|(i, s)| {
        // One to itself there never is.
        i != place.index && s.is_none()
    }) {
        if let Ok((to, called)) = calls.made.try_recv() {
            let stream = called.map_err(|e| apart(place.index, to, &e))?;
            if let Some(slot) = streams.get_mut(to) {
                *slot = Some(stream);
            }
            continue;
        }
        match arrivals.next() {
            Some((stream, peer)) if peer.run == run => {
                let slot = streams.get_mut(peer.index).filter(|s| s.is_none());
                let mine = slot.filter(|_| peer.index > place.index);
                if let Some(slot) = mine
                    && settled(&stream).is_ok()
                {
                    *slot = Some(stream);
                }
            }
            // One of an earlier run.
            Some(_) => {}
            None if streams[0].as_ref().is_some_and(has_ended) => {
                let (from, to) = between(missing, place.index);
                return Err(apart(from, to, &"process 0 has ended"));
            }
            // Calls say by themselves that they were in vain, unless their thread has failed.
            None if missing < place.index && Instant::now() >= until + 4 * INTRODUCTION => {
                return Err(apart(place.index, missing, &"nothing came of its call"));
            }
            None if missing > place.index && Instant::now() >= until => {
                return Err(apart(missing, place.index, &"it did not call in time"));
            }
            None => std::thread::sleep(LOOK),
        }
    }
    Ok(Processes::new(place, all, connections(streams)))
}

/// The one of two processes that calls, and the one that is called.
fn between(one: usize, other: usize) -> (usize, usize) {
    (one.max(other), one.min(other))
}

/// Calls of a process to those before it but for process 0, several at the same time: one after the
/// other they took two round trips each. They end when this goes.
struct Calls {
    made: Receiver<(usize, Result<TcpStream, HandshakeError>)>,
    is_over: Arc<AtomicBool>,
}

impl Calls {
    /// Calls processes, whose addresses are given from process 1 on, until a moment. The nearest
    /// one is first, so that not everybody calls process 1 first.
    fn begin(addresses: Vec<SocketAddr>, peer: Peer, (token, until): (&Token, Instant)) -> Self {
        let (tell, made) = channel();
        let is_over = Arc::<AtomicBool>::default();
        let left = Arc::new(Mutex::new(addresses));
        let n = peer.index.saturating_sub(1);
        let peer = Arc::new(peer);
        for _ in 0..n.min(MOST_CALLS) {
            let (tell, left, is_over) = (tell.clone(), Arc::clone(&left), Arc::clone(&is_over));
            let (peer, token) = (Arc::clone(&peer), token.clone());
            std::thread::spawn(move || {
                while let Some((to, address)) = next_of(&left) {
                    let made = |stream| Ok(introduce(stream, &peer)?);
                    let called = loop {
                        match call(&address.to_string(), &token).and_then(made) {
                            Ok(stream) => break Ok(stream),
                            Err(e) if Instant::now() >= until => break Err(e),
                            Err(_) if is_over.load(Ordering::Relaxed) => return,
                            Err(_) => std::thread::sleep(10 * LOOK),
                        }
                    };
                    if tell.send((to, called)).is_err() {
                        return;
                    }
                }
            });
        }
        Calls { made, is_over }
    }
}

/// Takes the last process of those that are left, with its address.
fn next_of(left: &Mutex<Vec<SocketAddr>>) -> Option<(usize, SocketAddr)> {
    let mut left = left.lock().unwrap_or_else(PoisonError::into_inner);
    let to = left.len();
    left.pop().map(|address| (to, address))
}

impl Drop for Calls {
    fn drop(&mut self) {
        self.is_over.store(true, Ordering::Relaxed);
    }
}

/// Says to another process which one this is.
fn introduce(mut stream: TcpStream, peer: &Peer) -> io::Result<TcpStream> {
    say(&mut stream, peer)?;
    settled(&stream)?;
    Ok(stream)
}

fn connections(streams: Vec<Option<TcpStream>>) -> Vec<Option<Arc<dyn Connection>>> {
    let shared = |s: TcpStream| Arc::new(s) as Arc<dyn Connection>;
    streams.into_iter().map(|s| s.map(shared)).collect()
}

/// An error of a connection in words, where it is that its other end said nothing for so long: the
/// system says that a resource is unavailable.
pub(super) fn unanswered(e: io::Error, who: &str, limit: Duration) -> io::Error {
    match e.kind() {
        ErrorKind::WouldBlock | ErrorKind::TimedOut => {
            let seconds = limit.as_secs_f64();
            io::Error::new(
                ErrorKind::TimedOut,
                format!("{who} did not answer in {seconds} s"),
            )
        }
        _ => e,
    }
}

fn call(address: &str, token: &Token) -> Result<TcpStream, HandshakeError> {
    let mut problem = io::Error::new(ErrorKind::NotFound, "the name has no address");
    for address in address.to_socket_addrs()? {
        match TcpStream::connect_timeout(&address, INTRODUCTION) {
            Ok(mut stream) => {
                timed(&stream, Some(INTRODUCTION))?;
                // What follows the proof would wait until that has come.
                stream.set_nodelay(true)?;
                handshake::call(&mut stream, token).map_err(|e| match e {
                    HandshakeError::Io(e) => unanswered(e, "it", INTRODUCTION).into(),
                    other => other,
                })?;
                return Ok(stream);
            }
            Err(e) => problem = e,
        }
    }
    Err(problem.into())
}
