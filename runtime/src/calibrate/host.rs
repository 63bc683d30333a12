//! How fast ranks copy what they hold to memory of the host, and the host writes it to storage.

use super::median;
use ir::cluster::MeasuredPoint;
use std::hint::black_box;
use std::io::Write;
use std::path::Path;
use std::time::Instant;

const REPETITIONS: usize = 5;

/// The points `to host`, of `n` ranks that copy at once, and `write`, to a file in `folder` that
/// is on the storage when the clock stops and is removed after. Without `write` where the folder
/// cannot be written to.
pub(super) fn host(n: u32, quick: bool, folder: &Path) -> Vec<MeasuredPoint> {
    let bytes = if quick { 1 << 22 } else { 1 << 25 };
    let mut points = vec![point("to host", bytes, copies(n, bytes))];
    let file = folder.join(format!(".meshwright-calibrate-{}", std::process::id()));
    let block = vec![0x5au8; bytes];
    let written: Result<Vec<f64>, std::io::Error> =
        (0..REPETITIONS).map(|_| write(&file, &block)).collect();
    // Nothing is lost where this fails: the next calibration of this process uses the name again.
    let _ = std::fs::remove_file(&file);
    if let Ok(seconds) = written {
        points.push(point("write", bytes, seconds));
    }
    points
}

/// Seconds of the slowest of `n` threads that each copy a block of their own, repeatedly.
fn copies(n: u32, bytes: usize) -> Vec<f64> {
    let copy = || -> Vec<f64> {
        let from = vec![0x5au8; bytes];
        let mut to = vec![0u8; bytes];
        let once = |to: &mut Vec<u8>| {
            let started = Instant::now();
            to.copy_from_slice(black_box(&from));
            black_box(&to);
            started.elapsed().as_secs_f64()
        };
        (0..REPETITIONS).map(|_| once(&mut to)).collect()
    };
    std::thread::scope(|scope| {
        let ranks: Vec<_> = (0..n.max(1)).map(|_| scope.spawn(copy)).collect();
        let mut slowest = vec![0.0f64; REPETITIONS];
        for rank in ranks {
            // A thread that failed has measured nothing; the others have.
            for (all, one) in slowest.iter_mut().zip(rank.join().unwrap_or_default()) {
                *all = all.max(one);
            }
        }
        slowest
    })
}

fn write(file: &Path, block: &[u8]) -> Result<f64, std::io::Error> {
    let started = Instant::now();
    let mut out = std::fs::File::create(file)?;
    out.write_all(block)?;
    out.sync_all()?;
    Ok(started.elapsed().as_secs_f64())
}

fn point(what: &str, bytes: usize, seconds: Vec<f64>) -> MeasuredPoint {
    let n = seconds.len() as u32;
    let median_s = median(seconds.clone());
    MeasuredPoint {
        what: what.into(),
        size: vec![bytes as u64],
        median_s,
        spread_s: median(seconds.into_iter().map(|s| (s - median_s).abs()).collect()),
        n,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copies_and_writes_are_measured_and_nothing_is_left() {
        let folder = tempfile::tempdir().unwrap();
        let points = host(2, true, folder.path());
        let names: Vec<&str> = points.iter().map(|p| p.what.as_str()).collect();
        assert_eq!(names, ["to host", "write"]);
        assert!(
            points
                .iter()
                .all(|p| p.median_s > 0.0 && p.size == [1 << 22])
        );
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
        // A folder that is not there.
        let points = host(1, true, &folder.path().join("none"));
        assert_eq!(points.len(), 1);
    }
}
