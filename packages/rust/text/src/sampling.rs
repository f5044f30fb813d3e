use std::collections::{HashMap, HashSet};
use std::hash::{BuildHasher, RandomState};
use std::path::Path;

use serde_json::Value;

use crate::TextError;

/// Options for choosing tokens, with transformers' defaults and order.
#[derive(Debug, Clone, PartialEq)]
pub struct Sampling {
    /// Divides the logits; 0 takes the likeliest token.
    pub temperature: f64,
    /// Keeps so many of the likeliest tokens, and tokens as likely as the last of them; 0: all.
    pub top_k: usize,
    /// Keeps the fewest of these tokens whose probabilities sum up to this number.
    pub top_p: f64,
    /// Keeps the tokens that are at least this many times as likely as the likeliest token; 0: all.
    pub min_p: f64,
    /// Divides the logit of each token of prompt and answer; multiplies a negative logit.
    pub repetition_penalty: f64,
    /// Subtracted from the logit of each token of the answer.
    pub presence_penalty: f64,
    /// Subtracted as often as the token occurs in the answer.
    pub frequency_penalty: f64,
    /// The seed of the random numbers; None: another one each time.
    pub seed: Option<u64>,
}

impl Default for Sampling {
    fn default() -> Self {
        Self {
            temperature: 1.0,
            top_k: 50,
            top_p: 1.0,
            min_p: 0.0,
            repetition_penalty: 1.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            seed: None,
        }
    }
}

impl Sampling {
    /// Take the likeliest token, without penalties.
    pub fn greedy() -> Self {
        Self { temperature: 0.0, ..Self::default() }
    }

    /// Return what a folder's generation_config.json recommends; without the file, the likeliest token.
    pub fn of_folder(folder: &Path) -> Result<Self, TextError> {
        let path = folder.join("generation_config.json");
        if !path.exists() {
            return Ok(Self::greedy());
        }
        let wrong = |text: String| TextError(format!("{}: {text}", path.display()));
        let bytes = std::fs::read(&path).map_err(|error| wrong(error.to_string()))?;
        let config: Value = serde_json::from_slice(&bytes).map_err(|error| wrong(error.to_string()))?;
        let number = |name: &str, default: f64| match &config[name] {
            Value::Null => Ok(default),
            found => found.as_f64().ok_or_else(|| wrong(format!("{name} is {found}, expected a number"))),
        };
        let mut sampling = Self { repetition_penalty: number("repetition_penalty", 1.0)?, ..Self::greedy() };
        if config["do_sample"] == true {
            sampling.temperature = number("temperature", 1.0)?;
            let top_k = number("top_k", 50.0)?;
            if top_k < 0.0 || top_k.fract() != 0.0 {
                return Err(wrong(format!("top_k is {top_k}, expected an integer from 0")));
            }
            sampling.top_k = top_k as usize;
            sampling.top_p = number("top_p", 1.0)?;
            sampling.min_p = number("min_p", 0.0)?;
        }
        sampling.check().map_err(|error| wrong(error.to_string()))?;
        Ok(sampling)
    }

    /// Fail if a number is outside its range.
    pub fn check(&self) -> Result<(), TextError> {
        let checks = [
            (self.temperature >= 0.0, "temperature", self.temperature, "a number from 0"),
            (self.top_p > 0.0 && self.top_p <= 1.0, "top_p", self.top_p, "a number above 0, at most 1"),
            ((0.0..=1.0).contains(&self.min_p), "min_p", self.min_p, "a number from 0 to 1"),
            (self.repetition_penalty > 0.0, "repetition_penalty", self.repetition_penalty, "a number above 0"),
            (true, "presence_penalty", self.presence_penalty, "a number"),
            (true, "frequency_penalty", self.frequency_penalty, "a number"),
        ];
        match checks.iter().find(|(holds, _, found, _)| !holds || !found.is_finite()) {
            Some((_, name, found, expected)) => Err(TextError(format!("{name} is {found}, expected {expected}"))),
            None => Ok(()),
        }
    }
}

/// Chooses token after token; the same seed and logits give the same tokens.
pub struct Sampler {
    sampling: Sampling,
    random: u64,
    seen: HashSet<i64>,
    chosen: HashMap<i64, u32>,
}

impl Sampler {
    /// Begin an answer. Repetition is counted from the prompt on.
    pub fn new(sampling: Sampling, prompt: impl IntoIterator<Item = i64>) -> Result<Self, TextError> {
        sampling.check()?;
        let random = sampling.seed.unwrap_or_else(|| RandomState::new().hash_one(0));
        Ok(Self { sampling, random, seen: prompt.into_iter().collect(), chosen: HashMap::new() })
    }

    /// Return a token id, from finite logits, which penalties change. Fail if a token of the prompt has no logit.
    pub fn choose(&mut self, logits: &mut [f32]) -> Result<i64, TextError> {
        self.penalize(logits)?;
        let mut token = best(logits);
        if self.sampling.temperature > 0.0 {
            token = self.drawn(logits, logits[token]);
        }
        self.seen.insert(token as i64);
        *self.chosen.entry(token as i64).or_default() += 1;
        Ok(token as i64)
    }

    fn penalize(&self, logits: &mut [f32]) -> Result<(), TextError> {
        let of = &self.sampling;
        let repetition = of.repetition_penalty as f32;
        if repetition != 1.0 {
            for &id in &self.seen {
                let most = logits.len() - 1;
                let logit = usize::try_from(id)
                    .ok()
                    .and_then(|at| logits.get_mut(at))
                    .ok_or_else(|| TextError(format!("token id {id} is outside the vocabulary, 0 to {most}")))?;
                *logit = if *logit < 0.0 { *logit * repetition } else { *logit / repetition };
            }
        }
        for (&id, &times) in &self.chosen {
            logits[id as usize] -= (of.presence_penalty + of.frequency_penalty * f64::from(times)) as f32;
        }
        Ok(())
    }

    fn drawn(&mut self, logits: &[f32], most: f32) -> usize {
        let of = self.sampling.clone();
        let weight = |id: usize| ((f64::from(logits[id]) - f64::from(most)) / of.temperature).exp();
        let total: f64 = if of.top_k == 0 { (0..logits.len()).map(weight).sum() } else { 0.0 };
        // The likeliest tokens are sorted, and all of them only if these are too few: most vocabularies are large.
        for least in [f64::from(most) - 16.0 * of.temperature, f64::NEG_INFINITY] {
            let mut ids: Vec<usize> = (0..logits.len()).filter(|&id| f64::from(logits[id]) >= least).collect();
            ids.sort_by(|&a, &b| logits[b].total_cmp(&logits[a]));
            let all = ids.len() == logits.len();
            let mut count = ids.len();
            if of.top_k > 0 && of.top_k < count {
                count = of.top_k;
                while count < ids.len() && logits[ids[count]] == logits[ids[count - 1]] {
                    count += 1;
                }
            } else if of.top_k > 0 && !all {
                continue;
            }
            let weights: Vec<f64> = ids[..count].iter().map(|&id| weight(id)).collect();
            let whole = if of.top_k > 0 { weights.iter().sum() } else { total };
            let (mut sum, mut kept) = (0.0, 0);
            while kept < count && sum < of.top_p * whole {
                sum += weights[kept];
                kept += 1;
            }
            if kept == count && !all && of.top_k == 0 {
                continue;
            }
            while kept > 1 && weights[kept - 1] < of.min_p * weights[0] {
                kept -= 1;
                sum -= weights[kept];
            }
            let mut at = self.next_double() * sum;
            for i in 0..kept {
                at -= weights[i];
                if at < 0.0 {
                    return ids[i];
                }
            }
            return ids[kept - 1];
        }
        unreachable!("the second round has all tokens")
    }

    /// Return a number from 0 to 1, without 1, by SplitMix64.
    fn next_double(&mut self) -> f64 {
        self.random = self.random.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.random;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) >> 11) as f64 / (1u64 << 53) as f64
    }
}

fn best(logits: &[f32]) -> usize {
    let mut best = 0;
    for (i, logit) in logits.iter().enumerate() {
        if *logit > logits[best] {
            best = i;
        }
    }
    best
}
