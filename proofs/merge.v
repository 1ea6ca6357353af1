(** Merging the outputs of splits by their log-sum-exp equals one softmax over their union. *)
From Coq Require Import Reals Lra.
From mathcomp Require Import all_ssreflect.
From Locks Require Import real_sum lse attention.
Set Implicit Arguments.
Unset Strict Implicit.
Unset Printing Implicit Defensive.
Local Open Scope R_scope.

Section Merge.
Variables (I : finType) (Dv S : nat) (A : {set I}) (split : I -> 'I_S).
Implicit Types (x : I -> R) (v : I -> vec Dv).

(** The tokens of A that split s works on. *)
Definition part (s : 'I_S) : {set I} := [set i in A | split i == s].

(** A split without tokens has mass 0 (log-mass -inf) and takes no part in a merge. *)
Definition used : pred 'I_S := fun s => part s != set0.

(** A sum over A is the sum over the used splits of their own sums. *)
Lemma sum_parts (F : I -> R) :
  \sum_(i in A) F i = \sum_(s | used s) \sum_(i in part s) F i.
Proof.
rewrite (partition_big split used) /=; last first.
  by move=> i iA; apply/set0Pn; exists i; rewrite inE iA eqxx.
by apply: eq_bigr => s _; apply: eq_bigl => i; rewrite inE.
Qed.

Lemma mass_parts x : mass A x = \sum_(s | used s) exp (lse (part s) x).
Proof. by rewrite /mass sum_parts; apply: eq_bigr => s us; rewrite exp_lse. Qed.

Lemma weighted_parts x v j :
  weighted A x v j = \sum_(s | used s) exp (lse (part s) x) * attention (part s) x v j.
Proof.
rewrite /weighted sum_parts; apply: eq_bigr => s us.
by rewrite exp_lse // -weightedE.
Qed.

(** exp(a - m) = exp(-m) exp(a): a shift m leaves the weights in proportion. *)
Lemma exp_minus a m : exp (a - m) = exp (- m) * exp a.
Proof. by rewrite -exp_plus; congr exp; lra. Qed.

Lemma sum_shifted x m :
  \sum_(s | used s) exp (lse (part s) x - m) = exp (- m) * mass A x.
Proof. by rewrite mass_parts -sum_scale; apply: eq_bigr => s _; rewrite exp_minus. Qed.

Lemma sum_shifted_weighted x v m j :
  \sum_(s | used s) exp (lse (part s) x - m) * attention (part s) x v j =
  exp (- m) * weighted A x v j.
Proof.
rewrite weighted_parts -sum_scale; apply: eq_bigr => s _.
by rewrite exp_minus; lra.
Qed.

(** For any number of splits, some of them possibly empty, and any shift m of the weights (a kernel
    takes the largest log-mass of a split, so that nothing overflows): the merged log-mass and the
    merged output are those of one softmax over the union. *)
Theorem lse_merge x v :
  A != set0 ->
  let L s := lse (part s) x in
  let O s := attention (part s) x v in
  [/\ \sum_(s | used s) exp (L s - lse A x) = 1,
      forall j, attention A x v j = \sum_(s | used s) exp (L s - lse A x) * O s j,
      forall m, lse A x = m + ln (\sum_(s | used s) exp (L s - m))
    & forall m j, attention A x v j =
        (\sum_(s | used s) exp (L s - m) * O s j) / (\sum_(s | used s) exp (L s - m))].
Proof.
move=> A0 L O; have mA := mass_gt0 x A0.
have expm a : 0 < exp (- a) by apply: exp_pos.
have inv : exp (- lse A x) = / mass A x by rewrite exp_Ropp exp_lse.
split=> [|j|m|m j]; rewrite ?sum_shifted ?sum_shifted_weighted ?inv.
- by field; lra.
- by rewrite attentionE /Rdiv Rmult_comm.
- by rewrite ln_mult // ln_exp /lse; lra.
- by rewrite attentionE; have := expm m => em; field; lra.
Qed.

End Merge.
