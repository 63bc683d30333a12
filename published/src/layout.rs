//! Megatron-Core's notation for the layers of a pipeline (`pipeline_model_parallel_layout`), such as
//! `Et*4|(t*4|)*14tmL`: `E` the embedding, `t` a transformer layer, `m` a layer that predicts a
//! further token, `L` the output layer with the loss, `|` the end of a stage, `*n` repeats what is
//! before it, a letter or a group in parentheses.

/// The layers of a pipeline.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layout {
    /// Layers of each stage, the embedding and the output layer a layer each.
    pub counts: Vec<u64>,
    /// How many of them predict further tokens.
    pub further: u64,
}

/// The most letters of a layout, and the deepest nesting of groups.
const MOST: (usize, usize) = (4096, 8);

/// Reads a layout; none where it is not one.
pub fn parse(text: &str) -> Option<Layout> {
    let letters: Vec<char> = text.chars().filter(|c| !c.is_whitespace()).collect();
    let (all, rest) = unrolled(&letters, 0)?;
    if !rest.is_empty() || all.first() != Some(&'E') || all.last() != Some(&'L') {
        return None;
    }
    let stages: String = all.iter().collect();
    let of_stage = |stage: &str| stage.chars().count() as u64;
    Some(Layout {
        counts: stages.split('|').map(of_stage).collect(),
        further: all.iter().filter(|c| **c == 'm').count() as u64,
    })
}

/// The letters before the end or a closing parenthesis, written out, and what is behind them.
fn unrolled(mut rest: &[char], depth: usize) -> Option<(Vec<char>, &[char])> {
    let mut all = Vec::new();
    while let Some((&c, behind)) = rest.split_first() {
        let part = match c {
            ')' => break,
            '(' if depth < MOST.1 => {
                let (part, behind) = unrolled(behind, depth + 1)?;
                rest = behind.strip_prefix(&[')'])?;
                part
            }
            'E' | 't' | 'm' | 'L' | '|' => {
                rest = behind;
                vec![c]
            }
            _ => return None,
        };
        let mut times = 1;
        if let Some(behind) = rest.strip_prefix(&['*']) {
            let digits: String = behind.iter().take_while(|c| c.is_ascii_digit()).collect();
            times = digits.parse().ok().filter(|n| *n <= MOST.0)?;
            rest = &behind[digits.len()..];
        }
        if all.len() + part.len() * times > MOST.0 {
            return None;
        }
        (0..times).for_each(|_| all.extend(&part));
    }
    Some((all, rest))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layouts_are_written_out() {
        let of = |text: &str| parse(text).map(|l| (l.counts, l.further));
        assert_eq!(of("EttL"), Some((vec![4], 0)));
        assert_eq!(of("Et*2|(t|)*2tmL"), Some((vec![3, 1, 1, 3], 1)));
        assert_eq!(of("Et|((t|)*2tt|)*1 L"), Some((vec![2, 1, 1, 2, 1], 0)));
        let (counts, _) = of("Et|(tt|)*30mL").unwrap();
        assert_eq!(
            (counts.len(), counts[31], counts.iter().sum::<u64>()),
            (32, 2, 64)
        );
        for wrong in [
            "",
            "tL",
            "Et",
            "Et|(tL",
            "Et)L",
            "Ex|L",
            "Et*|L",
            "Et*99999|L",
            "E(t*4000)*9L",
        ] {
            assert_eq!(of(wrong), None, "{wrong}");
        }
        assert_eq!(of(&format!("E{}t{}L", "(".repeat(9), ")".repeat(9))), None);
    }
}
