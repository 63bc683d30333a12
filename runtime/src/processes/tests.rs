use super::frame::{self, Head, Letter, Parts};
use super::handshake::{self, HandshakeError};
use super::rendezvous::{self, Fingerprint, Hello, Host, JoinError, Peer, Place, Way, Who};
use super::rendezvous::{join, unanswered};
use super::suite::Rankful;
use super::{Processes, Token};
use crate::arena::Bytes;
use crate::device::Cpu;
use crate::error::RuntimeError;
use crate::execute::message::{Reply, Request};
use crate::fabric::Fabric;
use ir::Rank;
use proptest::prelude::*;
use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::time::{Duration, Instant};

const PATIENCE: Duration = Duration::from_secs(30);

fn loopback() -> SocketAddr {
    ([127, 0, 0, 1], 0).into()
}

fn plan(name: &str) -> Fingerprint {
    Fingerprint([("the plan".to_string(), name.to_string())].into())
}

fn host() -> (Host, String, Token) {
    let host = Host::open(loopback(), Token::random().unwrap()).unwrap();
    let (address, token) = (host.address().to_string(), host.token().clone());
    (host, address, token)
}

/// A run of so many processes, all of them this one.
pub(crate) fn assembled(of: usize) -> Vec<Processes> {
    let (host, address, token) = host();
    let joins = (1..of).map(|index| {
        let (address, token) = (address.clone(), token.clone());
        std::thread::spawn(move || {
            let find = &mut || Ok((address.clone(), token.clone()));
            let way = Way::LookedUp(find);
            join(Place { index, of }, &plan("a"), PATIENCE, way).unwrap()
        })
    });
    let joins: Vec<_> = joins.collect();
    let first = host.gather(of, &plan("a"), PATIENCE, &mut || None).unwrap();
    let others = joins.into_iter().map(|j| j.join().unwrap());
    std::iter::once(first).chain(others).collect()
}

/// Ranks, as many as asked for, in processes of `each`.
fn endpoints(n: u32, each: usize, timeout: Duration) -> Vec<Rankful> {
    let all: Vec<Rank> = (0..n).map(Rank).collect();
    let shares: Vec<Vec<Rank>> = all.chunks(each).map(<[Rank]>::to_vec).collect();
    let processes = assembled(shares.len()).into_iter();
    processes
        .flat_map(|process| Rankful::of(&Arc::new(process), &shares, timeout))
        .collect()
}

#[test]
fn processes_conform() {
    for each in [1, 2] {
        crate::fabric::conformance::passes(&|n, bytes, timeout| {
            let ends = endpoints(n, each, timeout).into_iter();
            ends.map(|e| (Cpu::new(bytes, 0, 1), e)).collect()
        });
    }
}

/// Rank 0 waits for rank 1, which waits for rank 2, whose process dies: both are told.
#[test]
fn a_process_that_dies_ends_even_what_does_not_wait_for_it() {
    let mut ends = endpoints(3, 1, PATIENCE);
    let dead = ends.pop().unwrap();
    let began = Instant::now();
    let waits = |mut end: Rankful, group: [Rank; 2]| {
        std::thread::spawn(move || {
            let mut device = Cpu::new(8, 0, 1);
            let error = end.endpoint.barrier(&mut device, &group).unwrap_err();
            // It stays, as a rank whose step has failed does.
            (error, end)
        })
    };
    let second = waits(ends.pop().unwrap(), [Rank(1), Rank(2)]);
    let first = waits(ends.pop().unwrap(), [Rank(0), Rank(1)]);
    std::thread::sleep(Duration::from_millis(100));
    // Not in order, as it would when its rank leaves first: its connections break.
    dead.break_off();
    let ended = [first, second].map(|w| w.join().unwrap());
    assert!(began.elapsed() < PATIENCE / 2);
    for (error, _) in &ended {
        let by = matches!(error, RuntimeError::Aborted { by: Rank(2), .. });
        assert!(by, "{error}");
    }
}

#[test]
fn another_plan_is_refused_and_named() {
    let (host, address, token) = host();
    let other = std::thread::spawn(move || {
        let way = Way::Known(address, token);
        join(Place { index: 1, of: 2 }, &plan("b"), PATIENCE, way).unwrap_err()
    });
    let error = host
        .gather(2, &plan("a"), PATIENCE, &mut || None)
        .unwrap_err();
    let words = "the plan of process 1 is b, that of process 0 a";
    assert_eq!(error.to_string(), words);
    let told = other.join().unwrap();
    assert!(
        matches!(&told, JoinError::Refused { reason, .. } if reason == words),
        "{told}"
    );
}

#[test]
fn strangers_do_not_hold_up_a_run() {
    let (host, address, token) = host();
    let at: SocketAddr = address.parse().unwrap();
    // Nothing, garbage, another service's words, and one with another token.
    let silent = TcpStream::connect(at).unwrap();
    for garbage in [&[0xff; 100][..], b"GET / HTTP/1.1\r\n\r\n"] {
        TcpStream::connect(at).unwrap().write_all(garbage).unwrap();
    }
    let wrong = std::thread::spawn({
        let address = address.clone();
        move || {
            // One that may find another token yet goes on trying; one that cannot does not.
            let find = &mut || Ok((address.clone(), Token::random().unwrap()));
            let soon = Duration::from_millis(300);
            let place = Place { index: 1, of: 2 };
            let looked = join(place, &plan("a"), soon, Way::LookedUp(find)).unwrap_err();
            let began = Instant::now();
            let way = Way::Known(address, Token::random().unwrap());
            let known = join(place, &plan("a"), PATIENCE, way).unwrap_err();
            assert!(began.elapsed() < PATIENCE / 2, "{:?}", began.elapsed());
            [looked, known]
        }
    });
    let gathered =
        std::thread::spawn(move || host.gather(2, &plan("a"), PATIENCE, &mut || None).unwrap());
    let [looked, known] = wrong.join().unwrap();
    for error in [&looked, &known] {
        let words = error.to_string();
        assert!(words.contains("its token is another one"), "{words}");
    }
    assert!(
        matches!(looked, JoinError::Unreachable { .. }),
        "{looked:?}"
    );
    assert!(matches!(known, JoinError::Token { .. }), "{known:?}");
    let began = Instant::now();
    let way = Way::Known(address, token);
    let joined = join(Place { index: 1, of: 2 }, &plan("a"), PATIENCE, way).unwrap();
    let first = gathered.join().unwrap();
    assert!(
        began.elapsed() < Duration::from_secs(4),
        "the silent one was waited for"
    );
    assert_eq!((first.place().index, joined.place().index), (0, 1));
    assert_eq!((first.on_this_host(), joined.n_hosts()), (2, 1));
    drop(silent);
}

/// Two hundred connections that say nothing, and one that says a byte now and then, as far as it goes
/// what is right: who belongs to the run joins while they are there, and the slow one is closed.
#[test]
fn slow_and_many_strangers_keep_nobody_out() {
    let (host, address, token) = host();
    let gathered =
        std::thread::spawn(move || host.gather(2, &plan("a"), PATIENCE, &mut || None).unwrap());
    let at: SocketAddr = address.parse().unwrap();
    let mut slow = TcpStream::connect(at).unwrap();
    let dripping = std::thread::spawn(move || {
        // Ten seconds: twice as long as anybody has to say who it is.
        let introduction = [&handshake::MAGIC[..], &[7; 32]].concat();
        introduction.iter().any(|&byte| {
            std::thread::sleep(Duration::from_millis(250));
            slow.write_all(&[byte]).is_err()
        })
    });
    let silent: Vec<TcpStream> = (0..200).map(|_| TcpStream::connect(at).unwrap()).collect();
    // In turn, they would take a thousand seconds.
    let way = Way::Known(address, token);
    let joined = join(Place { index: 1, of: 2 }, &plan("a"), PATIENCE, way).unwrap();
    let first = gathered.join().unwrap();
    assert_eq!((first.on_this_host(), joined.place().index), (2, 1));
    drop(silent);
    assert!(dripping.join().unwrap(), "the slow one was never closed");
}

/// Asserts that the other end of a connection says nothing more and closes it.
fn is_closed(stream: &mut TcpStream) {
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    let more = stream.read(&mut [0; 64]);
    let is_over = match &more {
        Ok(n) => *n == 0,
        Err(e) => e.kind() == ErrorKind::ConnectionReset,
    };
    assert!(is_over, "{more:?}");
}

/// One of another version of the protocol says so, whoever called; it proves nothing, and so it ends no
/// run of others.
#[test]
fn another_version_of_the_protocol_is_refused_and_said() {
    let mut later = handshake::MAGIC;
    later[7] += 1;
    // It calls process 0, and is told which version this is, with no proof of the token.
    let (host, address, token) = host();
    let gathered =
        std::thread::spawn(move || host.gather(2, &plan("a"), PATIENCE, &mut || None).unwrap());
    let mut stream = TcpStream::connect(&address).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    stream.write_all(&[&later[..], &[7; 32]].concat()).unwrap();
    let mut answer = [0; 8];
    stream.read_exact(&mut answer).unwrap();
    assert_eq!(answer, handshake::MAGIC);
    is_closed(&mut stream);
    let place = Place { index: 1, of: 2 };
    let joined = join(place, &plan("a"), PATIENCE, Way::Known(address, token)).unwrap();
    assert_eq!(gathered.join().unwrap().on_this_host(), 2);
    drop(joined);
    // It is process 0.
    let listener = TcpListener::bind(loopback()).unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let other = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        stream.read_exact(&mut [0; 40]).unwrap();
        stream.write_all(&[&later[..], &[7; 64]].concat()).unwrap();
    });
    let way = Way::Known(address, Token::random().unwrap());
    // One try.
    let error = join(place, &plan("a"), Duration::ZERO, way).unwrap_err();
    other.join().unwrap();
    let words = error.to_string();
    assert!(
        words.contains("what answers there is no Meshwright of this version"),
        "{words}"
    );
}

/// Versions and binaries are facts as the plan is: which one differs is said on both sides, and one
/// that an older build does not know of is missing.
#[test]
fn another_version_or_binary_is_refused_and_named() {
    for (what, theirs, words) in [
        ("the version", Some("0.9"), "0.9"),
        ("the binary", Some("6f"), "6f"),
        ("the binary", None, "missing"),
    ] {
        let of = |value: Option<&str>| {
            let mut all = plan("a");
            all.0
                .extend(value.map(|v| (what.to_string(), v.to_string())));
            all
        };
        let (host, address, token) = host();
        let (ours, theirs) = (of(Some("5e")), of(theirs));
        let other = std::thread::spawn(move || {
            let way = Way::Known(address, token);
            join(Place { index: 1, of: 2 }, &theirs, PATIENCE, way).unwrap_err()
        });
        let error = host.gather(2, &ours, PATIENCE, &mut || None).unwrap_err();
        let expected = format!("{what} of process 1 is {words}, that of process 0 5e");
        assert_eq!(error.to_string(), expected);
        let told = other.join().unwrap();
        assert!(
            matches!(&told, JoinError::Refused { reason, .. } if *reason == expected),
            "{told}"
        );
    }
}

/// A process of an earlier run that has the same token, as one in a file may be, and calls the others of
/// a new one where a process of its own run had listened: the name of its run is another one.
#[test]
fn a_straggler_of_an_earlier_run_is_refused() {
    // Process 0 of three is this test.
    let token = Token::random().unwrap();
    let listener = TcpListener::bind(loopback()).unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let second = std::thread::spawn({
        let token = token.clone();
        move || {
            let way = Way::Known(address, token);
            join(Place { index: 1, of: 3 }, &plan("a"), PATIENCE, way).unwrap()
        }
    });
    let (mut stream, _) = listener.accept().unwrap();
    handshake::answer(&mut stream, &token).unwrap();
    let hello: Hello = rendezvous::hear(&mut stream).unwrap();
    let welcome = rendezvous::Reply::Welcome {
        run: "the new run".into(),
        listen: vec![hello.listens; 2],
        all: vec![Who::me(); 3],
    };
    rendezvous::say(&mut stream, &welcome).unwrap();
    let call = |index: usize, run: &str| {
        let mut stream = TcpStream::connect(hello.listens).unwrap();
        handshake::call(&mut stream, &token).unwrap();
        let run = run.to_string();
        rendezvous::say(&mut stream, &Peer { index, run }).unwrap();
        stream
    };
    // Of the earlier run; of this one, with numbers of others, and of nobody.
    for (index, run) in [
        (2, "an earlier run"),
        (2, ""),
        (0, "the new run"),
        (1, "the new run"),
        (3, "the new run"),
    ] {
        is_closed(&mut call(index, run));
        assert!(!second.is_finished(), "process {index} of {run} was let in");
    }
    let third = call(2, "the new run");
    let joined = second.join().unwrap();
    assert_eq!((joined.place().index, joined.on_this_host()), (1, 3));
    drop((stream, third));
}

/// Two of the same number, as where a process of an earlier run with the same token is still there: the
/// first one is of the run, and the other one is told.
#[test]
fn a_number_is_given_once() {
    let (host, address, token) = host();
    let gathered =
        std::thread::spawn(move || host.gather(3, &plan("a"), PATIENCE, &mut || None).unwrap());
    let (tell, told) = std::sync::mpsc::channel();
    let joins = |index: usize| {
        let (address, token, tell) = (address.clone(), token.clone(), tell.clone());
        std::thread::spawn(move || {
            let way = Way::Known(address, token);
            let _ = tell.send(join(Place { index, of: 3 }, &plan("a"), PATIENCE, way));
        })
    };
    let both = [joins(1), joins(1)];
    let refused = told.recv_timeout(PATIENCE).unwrap().unwrap_err();
    let words = "process 0 does not let process 1 join: another process has its number";
    assert_eq!(refused.to_string(), words);
    let third = joins(2);
    let in_time = || told.recv_timeout(PATIENCE).unwrap().unwrap();
    let mut all = [in_time(), in_time()].map(|p| p.place().index);
    all.sort_unstable();
    assert_eq!(all, [1, 2]);
    let first = gathered.join().unwrap();
    assert_eq!(first.on_this_host(), 3);
    both.into_iter()
        .chain([third])
        .for_each(|t| t.join().unwrap());
}

/// A connection whose other end says what was recorded, and which keeps what it is told.
struct Tape {
    says: std::io::Cursor<Vec<u8>>,
    told: Vec<u8>,
}

impl Read for Tape {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        self.says.read(buffer)
    }
}

impl Write for Tape {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.told.extend_from_slice(bytes);
        Ok(bytes.len())
    }
    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

/// A connection that an eavesdropper replays proves nothing on another one.
#[test]
fn a_recorded_introduction_is_not_taken_twice() {
    let token = Token::random().unwrap();
    // A caller and an answer that know the token, and what the caller says.
    let listener = TcpListener::bind(loopback()).unwrap();
    let address = listener.local_addr().unwrap();
    let caller = std::thread::spawn({
        let token = token.clone();
        move || {
            struct Recorded(TcpStream, Vec<u8>);
            impl Read for Recorded {
                fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
                    self.0.read(buffer)
                }
            }
            impl Write for Recorded {
                fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
                    self.1.extend_from_slice(bytes);
                    self.0.write_all(bytes).map(|()| bytes.len())
                }
                fn flush(&mut self) -> std::io::Result<()> {
                    Ok(())
                }
            }
            let mut stream = Recorded(TcpStream::connect(address).unwrap(), Vec::new());
            handshake::call(&mut stream, &token).unwrap();
            stream.1
        }
    });
    let (mut stream, _) = listener.accept().unwrap();
    handshake::answer(&mut stream, &token).unwrap();
    let said = caller.join().unwrap();
    assert_eq!(said.len(), 8 + 32 + 32);
    let tape = |says: Vec<u8>| Tape {
        says: std::io::Cursor::new(says),
        told: Vec::new(),
    };
    let again = handshake::answer(&mut tape(said.clone()), &token);
    assert!(matches!(again, Err(HandshakeError::Token)), "{again:?}");
    // Nor does an answer that was recorded, or the caller's own proof sent back.
    let mut heard = tape(said.clone());
    let _ = handshake::answer(&mut heard, &token);
    let again = handshake::call(&mut tape(heard.told), &token);
    assert!(matches!(again, Err(HandshakeError::Token)), "{again:?}");
    let mirrored = handshake::call(&mut tape(said), &token);
    assert!(
        matches!(mirrored, Err(HandshakeError::Token)),
        "{mirrored:?}"
    );
}

#[test]
fn whoever_does_not_come_is_named() {
    let (host, _, _) = host();
    let soon = Duration::from_millis(50);
    let error = host.gather(4, &plan("a"), soon, &mut || None).unwrap_err();
    assert!(matches!(&error, JoinError::Missing { missing, .. } if *missing == [1, 2, 3]));
    let (host, _, _) = self::host();
    let watch = &mut || Some("process 1 ended with exit code 3".to_string());
    let error = host.gather(2, &plan("a"), PATIENCE, watch).unwrap_err();
    assert_eq!(error.to_string(), "process 1 ended with exit code 3");
}

#[test]
fn who_waits_in_vain_says_for_what() {
    let place = Place { index: 1, of: 2 };
    // Too long for a name, so nobody is asked for it.
    let nowhere = format!("{}.invalid:29400", "x".repeat(70));
    let way = Way::Known(nowhere.clone(), Token::random().unwrap());
    let soon = Duration::from_millis(50);
    let words = join(place, &plan("a"), soon, way).unwrap_err().to_string();
    assert!(
        words.contains(&format!("cannot reach process 0 at {nowhere}")),
        "{words}"
    );
    // One that is connected and silent, as the system reports it.
    let listener = TcpListener::bind(loopback()).unwrap();
    let mut stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    stream.set_read_timeout(Some(soon)).unwrap();
    let error = stream.read_exact(&mut [0]).unwrap_err();
    let words = unanswered(error, "process 0", soon).to_string();
    assert_eq!(words, "process 0 did not answer in 0.05 s");
    let other = std::io::Error::other("it broke");
    assert_eq!(unanswered(other, "it", soon).to_string(), "it broke");
}

#[test]
fn tokens_are_not_printed() {
    let token = Token::random().unwrap();
    assert!(!format!("{token:?}").contains(&token.reveal()[..8]));
    assert!(Token::parse(&token.reveal()).unwrap() == token);
    assert!(Token::parse("abc").is_err());
    assert!(Token::random().unwrap() != token);
}

fn letter(ranges: &[(usize, usize)], len: usize) -> Letter {
    let block: Vec<u8> = (0..len).map(|i| i as u8).collect();
    let parts = Parts {
        len,
        ranges: ranges.iter().map(|&(a, b)| a..b).collect(),
    };
    let mut head = Head::Left { rank: Rank(7) };
    if !ranges.is_empty() {
        let call = crate::fabric::Call::world_sum(vec![Rank(0), Rank(1)], 3);
        let crate::fabric::CallKind::Collective(of) = call.kind else {
            unreachable!()
        };
        head = Head::Contribution {
            what: call.what,
            of,
            meeting: 3,
            place: 1,
            parts,
        };
    }
    Letter {
        head,
        body: Some(Arc::new(Bytes::copy_of(&block))),
    }
}

/// A connection on which nothing comes any more.
struct Silent;

impl Read for Silent {
    fn read(&mut self, _: &mut [u8]) -> std::io::Result<usize> {
        Err(ErrorKind::WouldBlock.into())
    }
}

#[test]
fn frames_carry_the_parts_that_are_needed() {
    // Short, and too long for one packet.
    for scale in [1, 100_000] {
        let ranges = [(scale, 3 * scale), (5 * scale, 6 * scale)];
        let sent = letter(&ranges, 8 * scale);
        let mut wire = Vec::new();
        frame::write(&mut wire, &sent).unwrap();
        assert!(wire.len() < 3 * scale + 400, "{}", wire.len());
        let mut from = &wire[..];
        let (head, block) = frame::read(&mut from).unwrap().unwrap();
        assert!(
            from.is_empty()
                && matches!(
                    head,
                    Head::Contribution {
                        meeting: 3,
                        place: 1,
                        ..
                    }
                )
        );
        let expected = |i: usize| match ranges.iter().any(|r| r.0 <= i && i < r.1) {
            true => i as u8,
            false => 0,
        };
        assert!(block.iter().enumerate().all(|(i, &b)| b == expected(i)));
        assert!(frame::read(&mut &wire[..0]).unwrap().is_none());
        // One bit, anywhere; all of those that lengths and places are made of. It is found before
        // anything waits for bytes that were not sent.
        let beginning = 0..8 * wire.len().min(400);
        let rest = (0..8 * wire.len()).step_by(4 + 8 * (1 + wire.len() / 500));
        for bit in beginning.chain(rest) {
            let turned = 1 << (bit % 8);
            wire[bit / 8] ^= turned;
            let error = frame::read(&mut (&wire[..]).chain(Silent)).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidData, "bit {bit}: {error}");
            wire[bit / 8] ^= turned;
        }
        assert!(frame::read(&mut &wire[..wire.len() - 1]).is_err());
    }
}

/// MessagePack would cut a part of a state at 4 GiB, so its head must not have it.
#[test]
fn parts_of_states_are_bodies() {
    let part = Bytes::copy_of(&vec![7u8; 100_000]);
    let sent = [
        Letter::request(Rank(3), Request::Write(ir::BufferId(5), part.clone())),
        Letter::answer(Rank(3), Ok(Reply::Part(part.clone()))),
    ];
    for letter in sent {
        let bare = Letter {
            head: letter.head,
            body: None,
        };
        let mut head = Vec::new();
        frame::write(&mut head, &bare).unwrap();
        assert!(head.len() < 300, "{}", head.len());
        let letter = Letter {
            head: bare.head,
            body: Some(Arc::new(part.clone())),
        };
        let mut wire = Vec::new();
        frame::write(&mut wire, &letter).unwrap();
        let (head, rest) = frame::read(&mut &wire[..]).unwrap().unwrap();
        let found = match head {
            Head::Request {
                request: Request::Write(ir::BufferId(5), part),
                ..
            } => part,
            Head::Answer {
                answer: Ok(Reply::Part(part)),
                ..
            } => part,
            other => panic!("{other:?}"),
        };
        assert!(found == part && rest.is_empty());
    }
}

proptest! {
    /// No bytes make a reader panic, or believe a length.
    #[test]
    fn any_bytes_are_read_or_refused(
        mut bytes in prop::collection::vec(any::<u8>(), 0..200),
        flips in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..4),
    ) {
        let _ = frame::read(&mut &bytes[..]);
        // Something near a true message.
        bytes.clear();
        frame::write(&mut bytes, &letter(&[(1, 20), (30, 40)], 64)).unwrap();
        for (at, value) in flips {
            let at = at.index(bytes.len());
            bytes[at] = value;
        }
        let _ = frame::read(&mut &bytes[..]);
    }
}
